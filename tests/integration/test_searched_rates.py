"""Jobs whose learning rate is found while training (actor.optimizer.schedule=auto)."""

import math
from collections import Counter

import pytest
import test_resume
from safetensors.torch import load_file
from test_resume import assert_same_run, rows_of

from hybridrl.trainers import reward_model, sft

model, own, run = test_resume.model, test_resume.own, test_resume.run
pytestmark = pytest.mark.usefixtures("process_group")
SEARCH = [
    *("warmup.steps=0", "trainer.steps=60", "eval.every=0", "actor.optimizer.schedule=auto"),
    *("actor.optimizer.stage_steps=10", "actor.optimizer.trial_rates=3", "resume=auto"),
    *("checkpoint.every=3", "actor.optimizer.decay_share=0.05"),
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
    settings,
):
    whole, said = run("whole", *settings)
    trials, stages = kinds_of(rows_of(whole))
    assert trials[:5] == [1, 2, 3, 4, 5] and stages[-1] == 60 and len(trials + stages) == 60
    assert len([line for line in said if "goes on with the learning rate" in line]) == 2
    in_trial, in_stage = (
        max(step for step in kind if step % 3 == 0 and step < 30 and step + 1 in kind)
        for kind in ([step for step in trials if step < 16], stages)
    )
    with monkeypatch.context() as patch:
        # Two steps after each of these. A start also plans two steps that it does not make.
        first = 2 + in_trial + 2
        fails_in_steps(patch, program, first, first + 2 + in_stage + 2 - in_trial)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                run("again", *settings)
        again, said = run("again", *settings)
    resumed = [line for line in said if "after step" in line]
    assert resumed == [f"resuming {again} after step {in_stage}"]
    assert_same_run(again, whole)
    rates = {row["policy/learning_rate"] for row in rows_of(whole) if "search/stage" in row}
    assert all(1e-6 < rate < 0.11 for rate in rates) and len(rates) > 4


def test_trials_learn_from_the_same_rows_from_the_same_weights(run):
    every = ["eval.every=1" if word == "eval.every=0" else word for word in SFT]
    written = rows_of(run("run", *every)[0])
    trials, stages = kinds_of(written)
    evaluated = {row["step"] for row in written if "eval/loss" in row} - {0}
    assert evaluated == set(stages) and trials, "what a trial has learned is gone"
    rows = [row for row in written if "policy/loss" in row]
    rates = [row.get("search/trial_log10_rate") for row in rows]
    starts = [n for n in range(15) if rates[n] and (n == 0 or rates[n] != rates[n - 1])]
    assert len(starts) >= 2
    assert len({rows[n]["policy/loss"] for n in starts}) == 1, "nothing is updated yet"
    assert len({rows[n + 1]["policy/loss"] for n in starts}) == len(starts), "rates differ"


SILLY = ["[1e-1,1]", "[1e-12,1e-9]", "[9e-1,1]", "[1e-3,1]"]


@pytest.mark.parametrize(
    ("bounds", "seed"),
    [(bounds, 0) for bounds in SILLY[:2]]
    + [pytest.param(bounds, seed, marks=pytest.mark.long) for bounds in SILLY for seed in range(5)],
)
def test_silly_ranges_do_no_harm(run, bounds, seed):
    settings = [*SFT, f"run.seed={seed}", f"actor.optimizer.learning_rate_range={bounds}"]
    folder, _ = run("run", *settings)
    losses = [row["policy/loss"] for row in rows_of(folder) if "policy/loss" in row]
    assert math.isfinite(losses[-1]) and losses[-1] < 1.05 * losses[0]
    weights = load_file(folder / "model" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
