"""Resuming over real Ray: after a kill in the middle of a step, and with generation apart."""

import signal

import psutil
import pytest
from safetensors.torch import load_file
from settings import LEARNS, SHORT
from test_resume import rows_of

from hybridrl.run.loop import RunLoop

pytestmark = [pytest.mark.more, pytest.mark.ray, pytest.mark.slow]
SLOW_REWARD = """
import time

def odd(prompt, response, **row):
    time.sleep(0.05)
    return float(sum(map(ord, response)) % 7)
"""
KILLED = [
    *(*SHORT, "rollout=transformers", "trainer.steps=6", "checkpoint.every=2", "eval.every=4"),
    *("rollout.samples_per_prompt=4", "algorithm.kl_coefficient=0.1", "resume=auto"),
    "observe.samples_every=1",
]


@pytest.mark.long
def test_a_driver_that_is_killed_in_a_step_is_started_again_by_the_same_command(command, tmp_path):
    (tmp_path / "own.py").write_text(SLOW_REWARD)
    settings = [*KILLED, f"reward.function={tmp_path}/own.py:odd"]
    killed = command(*settings)
    killed.wait_for("step 2: checkpoint saved")
    its_own = psutil.Process(killed.process.pid).children(recursive=True)
    killed.process.kill()
    killed.finish()
    assert not psutil.wait_procs(its_own, timeout=30)[1], "Ray, hosts and reward processes end"
    assert len(rows_of(killed.directory)) < 9
    again = command(*settings)
    assert again.finish() == 0, again.output
    assert "after step 2" in again.output and "supervised" not in again.output
    undisturbed = command(*settings, f"run.directory={tmp_path / 'whole'}")
    assert undisturbed.finish() == 0, undisturbed.output
    assert rows_of(killed.directory) == rows_of(tmp_path / "whole")
    mine, other = (
        load_file(folder / "model" / "model.safetensors")
        for folder in (killed.directory, tmp_path / "whole")
    )
    assert all(mine[name].equal(tensor) for name, tensor in other.items())


@pytest.mark.vllm
def test_generation_apart_goes_on_with_the_weights_and_the_count_of_before(run, tmp_path):
    """No evaluation brings the weights of now to the generator: only the checkpoint does."""
    settings = [*SHORT, *LEARNS, "placement=separation", "placement.staleness=1", "eval.every=0"]
    settings += ["checkpoint.every=2", "rollout.verify_weights=true", "trainer.steps=4"]
    whole = run(*settings, f"run.directory={tmp_path / 'whole'}")
    saves = RunLoop._checkpoint

    def dies(self, step, figures):
        saves(self, step, figures)
        raise ZeroDivisionError

    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(RunLoop, "_checkpoint", dies)
        run(*settings)
    signal.signal(signal.SIGTERM, before)
    half = run(f"resume={tmp_path / 'run'}")
    for found, expected in zip(rows_of(half), rows_of(whole), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
        exact = ("step", "reward/mean", "response/tokens", "staleness/max", "accuracy")
        assert [found.get(name) for name in exact] == [expected.get(name) for name in exact]
