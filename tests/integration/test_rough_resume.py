"""Resuming a run whose generator, or whose ranks, get weights as 4-bit differences, with real Ray:
such weights come of all that came before, which a run that goes on from a checkpoint has not."""

import json

import pytest
import torch
from safetensors.torch import load_file
from settings import LEARNS, SHORT

pytestmark = [pytest.mark.ray, pytest.mark.long]

# A run evaluates at its end, too, and each generation counts in the seeds of those after it.
SETTINGS = [
    *(*SHORT, *LEARNS, "rollout=transformers", "num_devices=2", "checkpoint.every=3"),
    *("eval.every=3", "rollout.max_tokens=6", "observe.show_every=0"),
]
WAYS = {
    "to the generator": ["placement=separation", "rollout.weight_sync=int4_delta"],
    "between ranks": ["actor.parallel.weights=int4_difference"],
}
SEEN = ("reward/", "policy/", "mismatch/", "response")
"""Figures that tell runs apart, and no times."""


def rows_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seen = [{name: row[name] for name in row if name.startswith(SEEN)} for row in rows]
    return [row for row in seen if "policy/loss" in row]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_stopped_and_went_on_is_the_run_that_did_not(run, tmp_path, way):
    whole, half = tmp_path / "whole", tmp_path / "half"
    run(*SETTINGS, *WAYS[way], "trainer.steps=6", f"run.directory={whole}")
    run(*SETTINGS, *WAYS[way], "trainer.steps=3", f"run.directory={half}")
    run(f"resume={half}", f"run.directory={half}", "trainer.steps=6")
    assert len(rows_of(whole)) == 6 and rows_of(half) == rows_of(whole)
    for file in (whole / "model").glob("*.safetensors"):
        mine, other = load_file(half / "model" / file.name), load_file(file)
        assert all(torch.equal(mine[name], other[name]) for name in other)
