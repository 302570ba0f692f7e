"""Searching the learning rate on two ranks over real Ray, each with its own shards in memory."""

import signal

import pytest
from safetensors.torch import load_file
from settings import SHORT
from test_resume import rows_of
from test_searched_rates import SFT, fails_in_steps, kinds_of

from hybridrl.trainers import sft

pytestmark = [pytest.mark.more, pytest.mark.ray, pytest.mark.slow]


def test_two_ranks_resume_in_a_trial_with_the_start_of_the_stage(run, tmp_path, monkeypatch):
    settings = [*SHORT, *SFT, "rollout=transformers", "num_devices=2"]
    whole = run(*settings, f"run.directory={tmp_path / 'whole'}")
    trials, _ = kinds_of(rows_of(whole))
    in_trial = max(step for step in trials if step % 3 == 0 and step < 16 and step + 1 in trials)
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        fails_in_steps(patch, sft, 2 + in_trial + 2)
        with pytest.raises(ZeroDivisionError):
            run(*settings)
    signal.signal(signal.SIGTERM, before)
    half = run(*settings)
    folder = half / "checkpoints"
    assert folder.exists() and rows_of(half) == rows_of(whole)
    mine, other = (load_file(f / "model" / "model.safetensors") for f in (half, whole))
    assert all(mine[name].equal(tensor) for name, tensor in other.items())
