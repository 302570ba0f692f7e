"""A generator in 8 bits, through the built-in trainer: its weights are the trainer's, rounded,
after every update, and its samples are weighed."""

import json

import pytest
from conftest import SHORT

pytestmark = [pytest.mark.ray, pytest.mark.vllm]
PLACES = [
    pytest.param([], id="on the trainer's devices"),
    pytest.param(["placement=separation"], id="on its own", marks=pytest.mark.long),
]


@pytest.mark.parametrize("place", PLACES)
def test_weights_in_8_bits_follow_the_trainers(run, place):
    folder = run(
        *(*SHORT, "num_devices=2", "rollout.quantization=int8", "rollout.verify_weights=true"),
        *place,
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "mismatch/k3" in line]
    assert len(steps) == 2
    for step in steps:
        assert 1e-7 < step["mismatch/k3"] < 0.1  # that in float32 is about 1e-14
        assert step["policy/correction_weight"] != 1
