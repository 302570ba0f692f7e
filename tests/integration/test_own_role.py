"""A role that only a user's file knows, over Ray, beside separate generation: it is planned,
placed, drawn, measured and saved like every other."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.ray, pytest.mark.long]

EXAMPLE = Path(__file__).parents[2] / "examples" / "distill.py"
KEPT = """

from pathlib import Path

from hybridrl.controller import ONE_TO_ALL, transfer
from hybridrl.workers.reference_worker import ReferenceWorker


class Teacher(ReferenceWorker):
    @transfer(ONE_TO_ALL)
    def save_model(self, folder: str) -> None:
        self.model_engine.save(Path(folder))


class Kept(Distill):
    @classmethod
    def roles(cls, config):
        return {**super().roles(config), "teacher": RoleSpec(Teacher, saves_as="kept_teacher")}
"""
TOKENS = 56
SETTINGS = [
    *("trainer.name=kept.py:Kept", "executor=ray", "rollout=transformers", "devices=cpu"),
    *("placement=separation", "num_devices=2", "warmup.steps=0", "eval.prompts=4", "eval.every=0"),
    "model.tiny={hidden_size: 512, layers: 6, heads: 8}",
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=6", "trainer.steps=3"),
    *(f"rollout.max_tokens={TOKENS}", f"rollout.min_tokens={TOKENS}"),
]
FREED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Without it the C library keeps what was freed, and every phase seems to take what the fullest one
of its process took."""


def planned(folder, *overrides):
    """What `hybridrl plan` says, as data."""
    found = subprocess.run(
        [sys.executable, "-m", "hybridrl.cli", "plan", *overrides, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=folder,
        timeout=300,
    )
    return json.loads(found.stdout)


def test_a_teacher_of_a_users_file_is_planned_placed_drawn_measured_and_saved(command, tmp_path):
    (tmp_path / "kept.py").write_text(EXAMPLE.read_text() + KEPT)
    run = command(*SETTINGS, environment=FREED)
    assert run.finish(timeout=500) == 0, run.output
    assert re.search(r"teacher +on \. 1", run.output), "the start says where it lives"
    kept = load_file(run.directory / "kept_teacher" / "model.safetensors")
    first = load_file(run.directory / "initial_model" / "model.safetensors")
    assert kept.keys() == first.keys()
    assert all(torch.equal(kept[name], first[name]) for name in first)

    plan = planned(tmp_path, *SETTINGS, "--lengths", f"6+{TOKENS}")
    assert plan["roles"]["teacher"]["devices"] == [1]
    assert plan["parameters"]["teacher"] == plan["parameters"]["actor"]
    assert "teacher" in {call["role"] for call in plan["time"]["calls"]}

    assert "compute_ref_log_prob" in (run.directory / "report.html").read_text()

    steps = [
        json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()
    ]
    measured = max(row.get("memory/teacher/score_peak_gib", 0.0) for row in steps)
    predicted = max(
        device["phases"]["teacher/score"]["bytes"] / 2**30
        for device in plan["memory"]
        if "teacher/score" in device["phases"]
    )
    assert 0.85 < predicted / measured < 1.15, (predicted, measured)
