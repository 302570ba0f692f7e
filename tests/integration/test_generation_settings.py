"""What the settings of generation promise holds for the samples of a job."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from hybridrl import main
from hybridrl.job.config_resolution import load_config

pytestmark = pytest.mark.more

JOB = [
    *("executor=inline", "devices=cpu", "warmup.steps=0"),
    *("model.tiny={hidden_size: 32, layers: 1, heads: 1}", "trainer.steps=1", "eval.prompts=1"),
    *("data.prompts_per_step=8", "rollout.samples_per_prompt=5", "observe.samples_every=1"),
]


def samples(folder, *overrides):
    job = [*JOB, "rollout=transformers", f"run.directory={folder}", *overrides]
    main.run(load_config(job))
    return pq.read_table(folder / "samples" / "step-000001.parquet").to_pylist()


def test_numbers_lengths_and_ends_of_samples(tmp_path):
    limits = ["rollout.max_tokens=6", "rollout.min_tokens=3", "rollout.stop=['1','=2']"]
    rows = samples(tmp_path / "run", *limits)
    assert len(rows) == 8 * 5 and len({row["prompt"] for row in rows}) == 8
    texts = [row["response"] for row in rows]
    stopped = [text for text in texts if text.endswith(("1", "=2"))]
    assert stopped and not any("1" in text[:-1] or "=2" in text[:-1] for text in texts)
    others = [row["tokens"] for row in rows if row["response"] not in stopped]
    assert others and set(others) <= {3, 4, 5, 6}, "of which some may be no text"
    assert any(len(text) < 3 for text in stopped), "min_tokens is about the model's own end"
    assert max(map(len, texts)) == 6


def test_one_of_the_likeliest_tokens_is_drawn(tmp_path):
    likeliest = samples(tmp_path / "one", "algorithm=expert_iteration", "rollout.top_k=1")
    by_prompt = {}
    for row in likeliest:
        by_prompt.setdefault(row["prompt"], set()).add(row["response"])
    assert len(by_prompt) == 8 and all(len(found) == 1 for found in by_prompt.values())
    two = samples(tmp_path / "two", "algorithm=expert_iteration", "rollout.top_k=2")
    firsts = {}
    for row in two:
        firsts.setdefault(row["prompt"], set()).add(row["response"][:1])
    assert max(map(len, firsts.values())) == 2


LEFT_OUT = [
    ["rollout=vllm", "rollout.top_p=0.8", "rollout.min_tokens=2", "actor.updates_per_step=2"],
    ["rollout=vllm", "rollout.min_tokens=3"],
    ["rollout=vllm", "rollout.min_p=0.3", "rollout.partial=0.5", "trainer.steps=3"],
    ["rollout=transformers", "rollout.top_k=5", "rollout.top_p=0.8", "rollout.partial=0.5"],
]
IN_TURN = """
import json, sys
from hybridrl import load_config, main

for settings in json.loads(sys.argv[1]):
    main.run(load_config(settings))
"""


def test_the_trainer_leaves_out_the_tokens_that_the_generator_left_out(tmp_path):
    """So that their log-probabilities of a first step are equal, at any temperature. A process runs
    one job after the other, as a notebook does."""
    jobs = [
        [*JOB, "rollout.temperature=0.7", f"run.directory={tmp_path / str(number)}", *settings]
        for number, settings in enumerate(LEFT_OUT)
    ]
    subprocess.run([sys.executable, "-c", IN_TURN, json.dumps(jobs)], check=True, timeout=500)
    for number in range(len(LEFT_OUT)):
        lines = (tmp_path / str(number) / "metrics.jsonl").read_text().splitlines()
        first, *others = [row for row in map(json.loads, lines) if "mismatch/k3" in row]
        assert first["mismatch/k3"] < 1e-10 and first["mismatch/max_abs"] < 1e-4
        assert all(row["mismatch/k3"] < 0.2 for row in others), (
            "of begun samples older weights' too"
        )
