"""Signs that a rising reward is not what was meant: told once, and not by chance."""

import json
import math
import random

import numpy as np
import pytest
from settings import configured
from tiers import few_of
from watching import finished, watched

from hybridrl.batch.trends import variance_of_sums
from hybridrl.run.watchers.tripwires import TripwireWatcher, resolve_tripwire_window

WINDOW = 10


def wires(*overrides, prompts=200):
    given = [f"guard.tripwires={WINDOW}", "reward.check=contains", *overrides]
    return TripwireWatcher(configured(given), prompts)


def told(found, steps, **figures):
    """What is said in so many steps of figures that are functions of the step's number."""
    said = []
    for step in range(steps):
        metrics = {NAMES[name]: figure(step) for name, figure in figures.items()}
        said += watched(found, finished(step + 1, metrics=metrics))
    return said


NAMES = {
    "reward": "reward/mean",
    "check": "check/contains",
    "length": "response/length_mean",
    "entropy": "policy/entropy",
    "repeated": "response/repeated",
}


def noisy(function, noise=0.02, seed=0):
    draw = random.Random(seed)
    return lambda step: function(step) + draw.gauss(0, noise)


def rising(step):
    return 0.2 + 0.01 * step


def test_a_reward_that_rises_while_what_is_meant_falls_is_told_once():
    found = wires()
    said = told(found, 60, reward=noisy(rising), check=noisy(lambda s: 0.6 - 0.008 * s, seed=1))
    assert len(said) == 1 and found.state()["told"] == ["check/contains"]
    assert "reward/mean rose from 0." in said[0] and "check/contains, which is not" in said[0]


def test_what_rose_at_first_is_told_when_it_is_below_its_beginning():
    def check(step):
        return 0.6 + 0.01 * min(step, 30) - 0.02 * max(0, step - 30)

    said = told(wires(), 50, reward=noisy(rising, seed=1), check=noisy(check))
    assert said == []  # 0.5, at its best 0.9, at first 0.6
    (said,) = told(wires(), 80, reward=noisy(rising, seed=1), check=noisy(check))
    assert 50 < int(said.split()[1].strip(":")) <= 70


def alike(function, r, noise=0.03, seed=0):
    """Steps that resemble the one before, with a correlation of r."""
    draw = random.Random(seed)
    state = [draw.gauss(0, 1)]

    def figure(step):
        state[0] = r * state[0] + math.sqrt(1 - r * r) * draw.gauss(0, 1)
        return function(step) + noise * state[0]

    return figure


@pytest.mark.more
@pytest.mark.parametrize("r", [0.5, 0.8])
def test_steps_that_resemble_each_other_are_no_sign(r):
    """As of a policy that drifts: 139 and 199 of 200 such runs were told of once."""
    cried = 0
    for seed in range(20):
        reward = noisy(lambda s: 0.3 + 0.5 * s / 200, seed=seed)
        check = alike(lambda s: 0.5, r, seed=seed)
        cried += bool(told(wires("guard.tripwires=20"), 200, reward=reward, check=check))
    assert cried <= 1


def test_what_falls_is_told_though_steps_resemble_each_other():
    for seed in range(5):
        reward = noisy(lambda s: 0.3 + 0.5 * s / 200, seed=seed)
        check = alike(lambda s: 0.5 - 0.4 * s / 200, 0.5, seed=seed)
        assert told(wires("guard.tripwires=20"), 200, reward=reward, check=check), seed


@pytest.mark.parametrize(
    ("reward", "check"),
    few_of(
        [
            (rising, rising),  # what is meant
            (rising, lambda s: 0.5),
            (lambda s: 0.5, lambda s: 0.6 - 0.008 * s),  # it unlearns, and is not paid for it
            (lambda s: 0.5, lambda s: 0.5),
        ],
        4,
        several=True,
    ),
)
def test_what_is_no_such_sign_is_not_told(reward, check):
    for seed in range(20):
        found = wires()
        series = {"reward": noisy(reward, seed=2 * seed), "check": noisy(check, seed=2 * seed + 1)}
        assert told(found, 60, **series) == []


def test_a_jump_is_told_soon():
    """A hole is found at once: the jump itself is no scatter."""
    for seed in range(5):
        reward = noisy(lambda s: 0.2 + 0.6 * (s > 100), seed=seed)
        check = alike(lambda s: 0.6 - 0.4 * (s > 100), 0.5, seed=seed)
        (said,) = told(wires("guard.tripwires=20"), 160, reward=reward, check=check)
        assert 100 < int(said.split()[1].strip(":")) <= 140


@pytest.mark.parametrize("r", [0.0, 0.5, 0.8])
def test_sums_of_steps_scatter_as_much_as_is_said(r):
    """The variance of an AR(1) series is known: (1 + r) / (1 - r) of one step's."""
    truth = (1 + r) / (1 - r)
    found = []
    for seed in range(40):
        figure = alike(lambda s: 0.01 * s + 3.0 * (s > 70), r, noise=1.0, seed=seed)
        found.append(variance_of_sums(np.array([figure(step) for step in range(200)])))
    assert 0.8 * truth < np.median(found) < 2.5 * truth


def test_responses_that_only_grow_are_told():
    def longer(step):
        return 20.0 + step

    still = {"length": longer, "check": lambda s: 0.5}
    said = told(wires(), 60, reward=noisy(rising), **still)
    assert len(said) == 1 and "responses grew from 24 to" in said[0]
    assert not told(wires(), 60, reward=noisy(lambda s: 0.5), **still)
    # Longer thinking may be what is learned: a measure that rises says so, and none says nothing.
    better = {"length": longer, "check": noisy(rising, seed=1)}
    assert not told(wires(), 60, reward=noisy(rising), **better)
    assert not told(wires(), 60, reward=noisy(rising), length=longer)


@pytest.mark.parametrize(("last", "count"), [(0.3, 1), (0.7, 0)])
def test_an_evaluation_says_whether_longer_is_better(last, count):
    found = wires()
    assert found.evaluated(0, 0.3) == found.evaluated(1, last) == []
    said = told(found, 60, reward=noisy(rising), length=lambda s: 20.0 + s)
    assert len(said) == count


@pytest.mark.parametrize("at", [5, 33, 59])
def test_a_resumed_run_goes_on_watching(at):
    def figures(first):
        return {
            name: (lambda step, figure=figure: figure(first + step))
            for name, figure in {
                "reward": lambda s: rising(s) + 0.01 * (s % 3),
                "check": lambda s: 0.6 - 0.008 * s + 0.01 * (s % 2),
                "length": lambda s: 20.0 + s,
                "entropy": lambda s: 1 / (1 + s),
            }.items()
        }

    whole = wires()
    assert len(told(whole, 200, **figures(0))) == 3
    before, after = wires(), wires()
    said = told(before, at, **figures(0))
    after.load_state(json.loads(json.dumps(before.state())))
    said += told(after, 200 - at, **figures(at))
    assert len(said) == 3 and after.state() == whole.state()
    assert max(map(len, after.state()["seen"].values())) == 11 * WINDOW
    other = wires("guard.tripwires=4")
    other.load_state(before.state())
    assert other.state()["seen"] == {}


def test_a_policy_that_tries_nothing_any_more_is_told():
    said = told(wires(), 60, entropy=lambda s: 1.0 / (1 + s), repeated=lambda s: min(1.0, s / 40))
    assert len(said) == 2
    assert "policy/entropy fell from" in said[0] and "were given before" in said[1]


def test_an_accuracy_that_falls_while_the_reward_rises_is_told():
    found = wires()
    told(found, 20, reward=noisy(rising))
    assert found.evaluated(20, 0.8) == []
    told(found, 30, reward=noisy(lambda s: rising(20 + s)))
    assert found.evaluated(40, 0.78) == []
    (said,) = found.evaluated(50, 0.5)
    assert "accuracy on 200 held-out prompts fell from 0.80 to 0.50" in said
    assert found.evaluated(60, 0.4) == []


def test_few_prompts_tell_nothing():
    found = wires(prompts=8)
    told(found, 50, reward=noisy(rising))
    assert found.evaluated(0, 0.8) == [] and found.evaluated(50, 0.5) == []


def test_nothing_is_watched_unless_asked():
    assert resolve_tripwire_window(configured([])) == 0
    assert resolve_tripwire_window(configured(["reward.check=exact"])) == 20
    assert resolve_tripwire_window(configured(["reward.check=exact", "guard.tripwires=0"])) == 0


def test_a_step_without_a_number_is_as_the_one_before():
    check = noisy(lambda s: 0.6 - 0.008 * s, seed=1)
    found = wires()
    holes = told(
        found, 60, reward=noisy(rising), check=lambda s: float("nan") if s % 7 == 3 else check(s)
    )
    assert len(holes) == 1
