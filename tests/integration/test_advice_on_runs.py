"""Advice on runs that were made with a fault, and on healthy ones."""

import pytest
from settings import TINY

from hybridrl.engine.hybrid_engine import HybridEngine
from hybridrl.job.config_resolution import load_config
from hybridrl.main import run as run_job
from hybridrl.report.advice import WARNING
from hybridrl.report.device_spans import read_device_spans
from hybridrl.report.run_evidence import RunEvidence
from hybridrl.report.run_summary import find_advice
from hybridrl.run_files.run_reader import RunReader

pytestmark = pytest.mark.more

JOB = [
    *(*TINY, "executor=inline", "rollout=transformers", "trainer.steps=6", "warmup.steps=60"),
    *("data.prompts_per_step=16", "observe.samples_every=1", "eval.every=0", "eval.prompts=16"),
]
REWARDS = """
import time

def same(response):
    return 1.0

def slow(response, answer):
    time.sleep(0.02)
    return float(response.strip() == answer)

def longer(response):
    return float(len(response))
"""
RIGHT_AT_FIRST = ["warmup.steps=200", "trainer.steps=8"]
FAULTS = {
    "dead groups": (["reward.function={rewards}:same"], "zero variance"),
    "slow reward": (["reward.function={rewards}:slow"], "reward functions take"),
    "tiny micro-batches": (["actor.tokens_per_microbatch=32"], "micro-batches are tiny"),
    "answers cut": (["rollout.max_tokens=2"], "end at the limit"),
    "reward by length": (["reward.function={rewards}:longer"], "length itself"),
    "too high a rate": (
        [*RIGHT_AT_FIRST, "actor.optimizer.learning_rate=3e-2"],
        "the reward fell from",
    ),
}
TWO_DEVICES = ["executor=ray", "num_devices=2", *RIGHT_AT_FIRST]
APART = [*TWO_DEVICES, "placement=separation"]


def advise(folder):
    return find_advice(RunEvidence(RunReader(folder)))


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_among_the_first_three(tmp_path, fault):
    (tmp_path / "rewards.py").write_text(REWARDS)
    overrides, said = FAULTS[fault]
    words = [word.format(rewards=tmp_path / "rewards.py") for word in overrides]
    run_job(load_config([*JOB, f"run.directory={tmp_path / 'run'}", *words]))
    found = advise(tmp_path / "run")
    assert any(said in advice.title and advice.numbers for advice in found[:3]), found


@pytest.mark.long
def test_weights_that_do_not_arrive_are_among_the_first_three(tmp_path, monkeypatch):
    """The generator goes on with the weights that it got first."""
    synchronise = HybridEngine._synchronise

    def only_once(engine):
        if not engine._is_planned:
            synchronise(engine)

    monkeypatch.setattr(HybridEngine, "_synchronise", only_once)
    run_job(load_config([*JOB, f"run.directory={tmp_path / 'run'}"]))
    found = advise(tmp_path / "run")
    (named,) = [advice for advice in found[:3] if "mismatch KL" in advice.title]
    assert named.kind == WARNING and "is rising" in named.title
    assert named.numbers["k3_last"] > 3 * named.numbers["k3_first"]
    assert "rollout.verify_weights" in named.action


@pytest.mark.long
@pytest.mark.ray
def test_a_pool_that_waits_is_among_the_first_three(run):
    """The generator makes four samples at a time, and the trainer waits for it."""
    found = advise(run(*JOB, *APART, "rollout.max_sequences=4"))
    (named,) = [advice for advice in found[:3] if "waited for other roles" in advice.title]
    assert named.kind == WARNING and named.title.startswith("device 0 ")
    assert "most of all waiting for generator.generate" in named.title
    assert named.numbers["idle"] > 0.4 and named.numbers["change"] < 0
    assert "placement.staleness=1" in named.action


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.parametrize(
    "healthy",
    [["algorithm=ppo"], ["placement=separation", "placement.staleness=1"]],
    ids=["ppo", "grpo apart"],
)
def test_two_devices_that_are_well_get_no_alarm(run, healthy):
    found = advise(run(*JOB, *TWO_DEVICES, *healthy))
    assert not [advice for advice in found if advice.kind == WARNING]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_the_built_in_job_gets_no_alarm(tmp_path, seed):
    words = ["executor=inline", "rollout=transformers", f"run.seed={seed}", "trainer.steps=10"]
    run_job(load_config([*words, f"run.directory={tmp_path / 'run'}"]))
    assert not [advice for advice in advise(tmp_path / "run") if advice.kind == WARNING]


def test_the_spans_of_a_run_cover_its_devices_and_say_what_was_beside_steps(tmp_path):
    words = ["warmup.steps=3", "trainer.steps=4", "eval.every=2", "checkpoint.every=2"]
    run_job(load_config([*JOB, *words, f"run.directory={tmp_path / 'run'}"]))
    spans = read_device_spans(tmp_path / "run")
    whole = max(span.end for span in spans)
    assert sum(span.seconds for span in spans) >= 0.97 * whole
    assert {span.step for span in spans} == {1, 2, 3, 4}
    phases = {"generate", "score", "advantage", "update", "sync", "save", "idle"}
    assert phases <= {span.phase for span in spans}
    assert {"data", "evaluation", "checkpoint"} <= {span.cause for span in spans}
