"""A role that only a user's file knows, over Ray, beside separate generation: it is planned,
placed, drawn and measured like every other."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROGRAM = Path(__file__).parents[2] / "examples" / "distill.py"
TOKENS = 56
SETTINGS = [
    *(f"trainer.name={PROGRAM}:Distill", "executor=ray", "rollout=transformers", "devices=cpu"),
    *("placement=separation", "num_devices=2", "warmup.steps=0", "eval.prompts=4", "eval.every=0"),
    "model.tiny={hidden_size: 512, layers: 6, heads: 8}",
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=6", "trainer.steps=3"),
    *(f"rollout.max_tokens={TOKENS}", f"rollout.min_tokens={TOKENS}", "observe.timeline_every=1"),
]
FREED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Without it the C library keeps what was freed, and every phase seems to take what the fullest one
of its process took."""


def planned(*overrides):
    """What `hybridrl plan` says, as data."""
    found = subprocess.run(
        [sys.executable, "-m", "hybridrl.cli", "plan", *overrides, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(found.stdout)


def test_a_teacher_of_a_users_file_is_planned_placed_drawn_and_measured(command):
    run = command(*SETTINGS, environment=FREED)
    assert run.finish(timeout=500) == 0, run.output
    assert re.search(r"teacher +on \. 1", run.output), "the start says where it lives"
    assert not (run.directory / "teacher").exists(), "its RoleSpec keeps no model"

    plan = planned(*SETTINGS, "--lengths", f"6+{TOKENS}")
    assert plan["roles"]["teacher"]["devices"] == [1]
    assert plan["parameters"]["teacher"] == plan["parameters"]["actor"]
    assert "teacher" in {call["role"] for call in plan["time"]["calls"]}

    drawn = run.directory / "timelines"
    assert "teacher.compute_ref_log_prob" in (drawn / "step-000003.json").read_text()
    assert (drawn / "step-000003.png").stat().st_size > 1000

    steps = [
        json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()
    ]
    measured = max(row.get("memory/teacher/score_peak_gib", 0.0) for row in steps)
    predicted = max(
        device["phases"]["teacher/score"]["bytes"] / 2**30
        for device in plan["memory"]
        if "teacher/score" in device["phases"]
    )
    assert 0.8 < predicted / measured < 1.25, (predicted, measured)
