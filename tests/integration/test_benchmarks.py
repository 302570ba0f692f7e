"""Every program of benchmarks/ runs at its smallest size and prints figures: `make bench-smoke`."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from pages import ROOT

pytestmark = pytest.mark.timeout(1200)
SECONDS = {
    *("codecs", "content_cache", "dispatch", "distillation", "output_head", "packing"),
    *("paper_placements", "reshard", "sandbox", "weight_sync"),
}
"""What takes half a minute is for `make test-more`, all others for `make test-long`."""
HOSTS = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="makes hosts: needs root and iproute2"
)
SMALLEST = {
    "auto_choice": (["1", "--steps", "4"], HOSTS),
    "auto_learning_rate": (["--seeds", "0", "--steps", "40"],),
    "checkpoint": (["--rounds", "1"],),
    "codecs": (["--values", "65536", "--rounds", "1"],),
    "core_isolation": (["--rounds", "1"], HOSTS),
    "content_cache": ([],),
    "curriculum": (["--seeds", "0", "--steps", "4"],),
    "dispatch": ([],),
    "distillation": ([],),
    "endpoint": (["--sessions", "2", "--tokens", "8", "--hidden", "64", "--rounds", "1"],),
    "endurance": (["--steps", "200"],),
    "gpu": (["--size", "tiny"],),
    "gradient_choice": (["--links", "400mbit", "--seconds", "1"], HOSTS),
    "hangs": (["--rounds", "1"],),
    "kept_sets": (["--seeds"],),
    "loading": (["--layers", "1"],),
    "low_bit_training": (["--seeds", "0", "--steps", "2"],),
    "mixed_devices": (
        ["--layers", "2", "--hidden", "64", "--tokens", "64", "--rounds", "1"],
        HOSTS,
    ),
    "mixed_generation": (["--layers", "2", "--hidden", "64", "--random", "1", "--seconds", "10"],),
    "operator_cost": (["--sizes", "64"],),
    "output_head": (["--tokens", "64", "--vocabulary", "2048", "--rounds", "1"],),
    "overhead": ([],),
    "packing": ([],),
    "paper_placements": (["13b"],),
    "placement": (["--only", "overlap", "--rounds", "1", "--steps", "3"],),
    "plan": (["grpo, small model, one micro-batch"],),
    "plan_at_size": ([],),
    "prefix_order": ([],),
    "quantised_generation": (["--rounds", "1", "--seeds"],),
    "recovery": (["--minutes", "1", "--fault-every", "30"],),
    "reshard": (["--rounds", "1", "--no-vllm"],),
    "meta_reward_models": (["--seeds", "0", "--steps", "2"],),
    "sandbox": ([],),
    "scaling": ([],),
    "shared_prompts": (["--rounds", "1"],),
    "step_trace": ([],),
    "slow_device": (
        ["--jobs", "1"],
        pytest.mark.skipif(
            not os.access("/sys/fs/cgroup/cpu", os.W_OK), reason="needs control groups, version 1"
        ),
    ),
    "slow_link": (["--rounds", "1", "--steps", "4"], HOSTS),
    "streamed_data": ([],),
    "timeline": (["--steps", "5"],),
    "unwaited_generation": (["--only", "partial"],),
    "versus_trl": (
        [],
        pytest.mark.skipif(
            not (ROOT / ".trl-venv").exists(),
            reason="makes .trl-venv, which takes GiBs",
        ),
    ),
    "weight_sync": (["--updates", "2", "--rates", "", "--hidden", "64"],),
    "what_if": (["--steps", "5", "responses twice as long"],),
}
"""Arguments of each program, and what it needs of the machine."""
PARTS = {"figures", "other_codecs", "trl_arm"}
FIGURE = {"name", "ratio", "goal", "ours", "baseline", "unit"}


def mark_of(name):
    return pytest.mark.more if name in SECONDS else pytest.mark.long


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        pytest.param(name, arguments, marks=[*marks, mark_of(name)], id=name)
        for name, (arguments, *marks) in SMALLEST.items()
    ],
)
def test_a_benchmark_runs(program, arguments, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HYBRIDRL_BENCH_SMOKE": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / f"{program}.py"), *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1100
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"# {program}: "), "it says how long it takes"
    figures = [json.loads(line) for line in lines if line.startswith('{"name"')]
    assert figures and all(figure.keys() >= FIGURE for figure in figures), done.stdout[-2000:]


def test_every_benchmark_is_listed():
    programs = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - PARTS
    assert programs == SMALLEST.keys()
