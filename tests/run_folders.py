"""Run folders as jobs leave them, made without a job, for tests of what is shown of runs."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import yaml
from pyarrow import parquet

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028\u202e"
"""What a model may say to whoever looks."""


def metrics_row(step):
    """What a step measures."""
    shares = {"generate": 0.3, "score": 0.1, "train": 0.5, "sync": 0.02, "other": 0.08}
    return {
        "step": step,
        "reward/mean": 0.2 + step / 1000,
        "response/length_mean": 12.0 + step % 7,
        "response/truncated": 0.01,
        "policy/entropy": 0.5,
        "policy/grad_norm": 1.0 + step % 3,
        "policy/clip_fraction": 0.1,
        "mismatch/k3": 1e-6,
        "throughput/tokens_per_second": 1000.0,
        "time/step": 2.0,
        "memory/actor/train_peak_gib": 1.5,
        **{f"time/{phase}": 2 * share for phase, share in shares.items()},
        **{f"share/{phase}": share for phase, share in shares.items()},
    }


def run_folder(path, steps=3, samples_at=(1,), rows=8, says="an answer", state="finished"):
    """A run of so many steps, with the samples of some."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(
        yaml.safe_dump({"trainer": {"name": "grpo", "steps": steps}, "run": {"name": path.name}})
    )
    noted = {"state": state, "why": "", "began": "2026-01-01T00:00:00+00:00", "ended": None}
    (path / "status.json").write_text(json.dumps(noted))
    pieces = [("<|user|>\n1+1?<|assistant|>\n", False), (f"{says}<|end|>", True)]
    first_row = {
        "name": "example",
        "pieces": [{"text": text, "is_learned": learned} for text, learned in pieces],
    }
    training = {"rows": 40, "exact_duplicates": 2, "near_duplicates": 0}
    reasons = {"too long": {"rows": 3, "first": "Row 7 of the data is too long."}}
    left_out = {"data.path": {"rows": 43, "left_out": 3, "reasons": reasons}}
    report = {"first_row": [first_row], "training": training, "left_out": left_out}
    (path / "data-report.json").write_text(json.dumps(report))
    lines = [{"step": 0, "accuracy": 0.25}, *map(metrics_row, range(1, steps + 1))]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "steps.jsonl").write_text("".join(_step(step) for step in range(1, steps + 1)))
    for step in samples_at:
        write_samples(path, step, rows, says)
    return path


def write_samples(path, step, rows=8, says="an answer", group=4):
    """Those of a step, and the tokens of the first four."""
    table = {
        "group_id": [row // group for row in range(rows)],
        "prompt": [f"prompt {row // group}" for row in range(rows)],
        "response": [says for _ in range(rows)],
        "scores": [float(row % 2) for row in range(rows)],
        "advantages": [[0.5, -0.5] for _ in range(rows)],
        "tokens": [1 for _ in range(rows)],
        "advantage": [0.5 for _ in range(rows)],
        "turns": [2 for _ in range(rows)],
        "turn_rewards": [[0.0, 1.0] for _ in range(rows)],
    }
    first = range(min(rows, 4))
    tokens = {
        "response_ids": [[5, 6] for _ in first],
        "response_mask": [[1, 0] for _ in first],
        "rollout_log_probs": [[-0.1, -2.0] for _ in first],
        "turn": [[0, 1] for _ in first],
        "advantages": [[0.5, -0.5] for _ in first],
    }
    for folder, columns in (("samples", table), ("tokens", tokens)):
        (path / folder).mkdir(exist_ok=True)
        parquet.write_table(pa.table(columns), path / folder / f"step-{step:06d}.parquet")


def copy_of(path, other):
    """The same run in another folder."""
    return Path(shutil.copytree(path, other))


def _step(step):
    call = {"rank": 0, "device": 0, "reads": [], "waited": 0.0, "tokens": 100}
    generate = {**call, "role": "actor", "method": "generate_sequences", "call": 2 * step}
    update = {**call, "role": "actor", "method": "update_actor", "call": 2 * step + 1}
    calls = [
        {**generate, "start": 0.1, "end": 0.9, "spans": [["generate", 0.1, 0.9, 0.0]]},
        {**update, "start": 1.0, "end": 2.0, "spans": [["train", 1.0, 2.0, 0.0]]},
    ]
    found = {"step": step, "begin": 100.0 + 2 * step, "seconds": 2.0, "ahead": {}}
    return json.dumps({**found, "calls": calls, "between": [], "driver": []}) + "\n"
