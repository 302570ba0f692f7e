"""Wherever roles live and however far generation is ahead: a run that was killed and goes on learns
from the prompts of the run that was not, in their order, none twice and none left out."""

from __future__ import annotations

import re

import pytest
from pyarrow import parquet
from test_resume_ray import SLOW_REWARD
from victims import Victim

pytestmark = [pytest.mark.more, pytest.mark.ray, pytest.mark.slow]
STEPS = 12
JOB = [
    *("rollout=transformers", "devices=cpu", "warmup.steps=0", f"trainer.steps={STEPS}"),
    "model.tiny={hidden_size: 32, layers: 2, heads: 1}",
    *("data.prompts_per_step=3", "rollout.samples_per_prompt=2", "rollout.max_tokens=4"),
    *("eval.prompts=8", "eval.every=0", "observe.samples_every=1", "observe.show_every=0"),
    *("checkpoint.every=3", "resume=auto", "algorithm.kl_coefficient=0.1", "num_devices=2"),
]
APART = ["placement=separation"]
KEPT = ["rollout.partial=0.4", "rollout.max_tokens=24"]


def long(*case, name):
    return pytest.param(*case, marks=pytest.mark.long, id=name)


@pytest.mark.parametrize(
    ("placement", "dies"),
    [
        long(["placement=flattening"], "driver", name="flattening"),
        long(["placement=interleaving"], "driver", name="interleaving"),
        long(["placement=separation"], "driver", name="apart"),
        long([*APART, "placement.staleness=1"], "driver", name="one step ahead"),
        long([*KEPT, "placement=flattening"], "driver", name="samples go on"),
        long([*KEPT, *APART, "placement.staleness=1"], "host", name="ahead, samples go on"),
        long([*KEPT, "rollout.engine=vllm"], "driver", name="vllm, samples go on"),
        long([*APART, "placement.staleness=2"], "driver", name="two steps ahead"),
        long([*APART, "placement.staleness=2"], "host", name="two steps ahead, a host"),
        long(
            [*APART, "placement.staleness=1", "placement.in_flight=true"], "host", name="any time"
        ),
    ],
)
def test_the_order_of_the_prompts_is_that_of_the_undisturbed_run(tmp_path, placement, dies):
    (tmp_path / "own.py").write_text(SLOW_REWARD)
    settings = [*JOB, f"reward.function={tmp_path}/own.py:odd", *placement]
    killed, whole = (Victim(tmp_path / name, *settings) for name in ("killed", "whole"))
    assert killed._wait(lambda: "step 3: checkpoint saved" in killed.output), killed.output
    killed.kill(dies)
    if dies == "driver":
        assert not killed.left_after(30)
        killed.start()
    assert killed.finish() == whole.finish() == 0, killed.output + whole.output
    went_on = re.search(r"(?:after|the checkpoint of) step ([369])\b", killed.output)
    assert went_on, killed.output
    assert prompts_of(killed) == prompts_of(whole)
    if "placement.in_flight=true" not in placement:  # where no two runs are alike
        assert killed.rows() == whole.rows()


def prompts_of(victim):
    """Of each step, in order; each as often as it was answered."""
    files = sorted((victim.run / "samples").glob("step-*.parquet"))
    assert len(files) == STEPS
    return [parquet.read_table(file, columns=["prompt"])["prompt"].to_pylist() for file in files]
