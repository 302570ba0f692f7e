"""Jobs whose learning rate is found while training (actor.optimizer.schedule=auto)."""

import math
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from test_resume import assert_same_run, model, own, rows_of, run  # noqa: F401 (fixtures)

from hybridrl.engine.training_snapshot import TrainingSnapshot
from hybridrl.trainers import reward_model, sft

pytestmark = pytest.mark.usefixtures("process_group")
SEARCH = [
    *("warmup.steps=0", "trainer.steps=60", "eval.every=0", "actor.optimizer.schedule=auto"),
    *("actor.optimizer.stage_steps=20", "actor.optimizer.trial_rates=3", "resume=auto"),
    "checkpoint.every=3",
]
SFT, PAIRS = ["algorithm=sft", *SEARCH], ["algorithm=reward_model", *SEARCH]


def fails_in_steps(monkeypatch, program, *numbers):
    """Each once, by its count of steps in all processes of the run."""
    step, made = program.Trainer.step, Counter()

    def fail(self):
        made["all"] += 1
        if made["all"] in numbers:
            raise ZeroDivisionError
        return step(self)

    monkeypatch.setattr(program.Trainer, "step", fail)


def kinds_of(rows):
    """The steps of trials and of stages."""
    trials = [row["step"] for row in rows if "search/trial_log10_rate" in row]
    return trials, [row["step"] for row in rows if "search/stage_log10_rate" in row]


@pytest.mark.parametrize(
    ("program", "settings"),
    [(sft, SFT), pytest.param(reward_model, PAIRS, marks=pytest.mark.more)],
)
def test_a_run_resumed_in_a_trial_and_in_a_stage_is_the_run_that_was_not(
    run,
    monkeypatch,
    program,
    settings,  # noqa: F811
):
    whole, said = run("whole", *settings)
    trials, stages = kinds_of(rows_of(whole))
    assert trials[:15] == list(range(1, 16)) and stages[:20] == list(range(16, 36))
    assert len([line for line in said if "goes on with the learning rate" in line]) == 2
    with monkeypatch.context() as patch:
        # After step 12, in the third trial; then after step 27, in the stage. Each start plans two
        # steps more than it makes.
        fails_in_steps(patch, program, 2 + 14, 2 + 14 + 2 + 17)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                run("again", *settings)
        again, said = run("again", *settings)
    assert [line for line in said if "after step" in line] == [f"resuming {again} after step 27"]
    assert_same_run(again, whole)
    rates = {row["policy/learning_rate"] for row in rows_of(whole)}
    assert all(1e-6 < rate < 0.11 for rate in rates) and len(rates) > 4


def test_trials_learn_from_the_same_rows_from_the_same_weights(run):  # noqa: F811
    rows = [row for row in rows_of(run("run", *SFT)[0]) if "policy/loss" in row]
    firsts = [rows[step]["policy/loss"] for step in (0, 5, 10, 15)]
    assert len(set(firsts)) == 1, "before its first update, each trial and the stage see the same"
    seconds = [rows[step]["policy/loss"] for step in (1, 6, 11)]
    assert len(set(seconds)) == 3, "rates differ"


@pytest.mark.parametrize("bounds", ["[1e-1,1]", "[1e-12,1e-9]"])
def test_silly_ranges_do_no_harm(run, bounds):  # noqa: F811
    folder, _ = run("run", *SFT, f"actor.optimizer.learning_rate_range={bounds}")
    losses = [row["policy/loss"] for row in rows_of(folder) if "policy/loss" in row]
    assert math.isfinite(losses[-1]) and losses[-1] < 1.05 * losses[0]
    weights = load_file(folder / "model" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
