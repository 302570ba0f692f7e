"""Episodes where several ranks generate: with one engine between them, and on devices of their
own."""

from __future__ import annotations

import json

import pytest
from pyarrow import parquet
from settings import SHORT

pytestmark = [pytest.mark.ray]
TOOL = """
import asyncio
from hybridrl import Turn

class Tool:
    async def reset(self, row):
        self.turns = 0

    async def step(self, response_text, response_ids):
        self.turns += 1
        await asyncio.sleep(0.003 * (response_ids[0] % 7))
        return Turn("12*", reward=0.5 * len(response_ids), done=self.turns == 3)
"""


@pytest.fixture
def settings(tmp_path):
    """Of a short job whose samples are three turns with a tool, which answers after some while."""
    (tmp_path / "tool.py").write_text(TOOL)
    return [
        *(*SHORT, "num_devices=2", f"rollout.episode={tmp_path}/tool.py:Tool"),
        *("rollout.max_tokens=24", "rollout.max_turn_tokens=4", "rollout.stop=['9']"),
        *("reward.function=[]", "observe.samples_every=1"),
    ]


def steps_of(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "response/turns" in row]


@pytest.mark.vllm
def test_ranks_that_share_an_engine_play_in_lockstep(run, settings):
    directory = run(*settings, "rollout=vllm", "rollout.parallel.tp=2", "rollout.kv_cache_gib=0.05")
    steps = steps_of(directory)
    assert len(steps) == 2
    for row in steps:
        assert row["response/turns"] > 1 and row["tools/errors"] == row["tools/timeouts"] == 0
        assert row["mismatch/k3"] < 1e-6


@pytest.mark.more
@pytest.mark.parametrize("flow", [[], ["placement.in_flight=true", "placement.staleness=1"]])
def test_episodes_leave_a_generator_as_they_finish(run, settings, flow):
    directory = run(*settings, "rollout=transformers", "placement=separation", *flow)
    steps = steps_of(directory)
    assert len(steps) == 2
    for number, row in enumerate(steps, 1):
        assert row["response/turns"] > 1 and row["tools/errors"] == 0
        samples = parquet.read_table(directory / "samples" / f"step-{number:06d}.parquet")
        versions = samples["policy_version"].to_pylist()
        assert len(versions) == 8 * 8
        assert flow or set(versions) == {number - 1 + steps_before(directory)}


def steps_before(directory):
    """Updates of the warm-up."""
    return 3
