"""The search of learning rates: forecasts, proposals and the plan of stages, against formulas of
their own; and the copies of training states that it goes back to."""

import json
import math
import random

import numpy as np
import pytest
from engine_cases import CLIPPED, TEMPERATURE, make_batch, make_engine
from scipy.optimize import least_squares
from settings import configured

from hybridrl.algorithms.loss_forecast import forecast_loss, smooth_losses
from hybridrl.algorithms.rate_proposal import (
    LENGTH_SCALE,
    NOISE_VARIANCE,
    PRIOR_VARIANCE,
    STAGE_VARIANCE,
    RateTrial,
    find_lowest_good_rate,
    predict_values,
    propose_rate,
)
from hybridrl.algorithms.rate_search import MIN_TRIAL_STEPS, RateSearch
from hybridrl.checks.check_list import check
from hybridrl.config.schema import OptimizerConfig
from hybridrl.engine.training_snapshot import TrainingSnapshot
from hybridrl.errors import ConfigError


@pytest.mark.parametrize(("scale", "rate", "limit"), [(2.0, 0.1, 1.0), (0.5, 0.02, 0.0)])
def test_a_forecast_is_that_of_the_nearest_exponential(scale, rate, limit):
    losses = [scale * math.exp(-rate * t) + limit for t in range(30)]
    exact = scale * math.exp(-rate * 300) + limit
    assert forecast_loss(losses, 300) == pytest.approx(exact, abs=0.03)
    noisy = np.array(losses[:7]) + 0.01 * np.random.default_rng(0).standard_normal(7)
    fit = least_squares(
        lambda p: p[0] * np.exp(-p[1] * np.arange(7)) + p[2] - noisy,
        (1.0, 0.1, 0.5),
        bounds=([-9, 1 / 70, 0], [9, 1, 9]),
    )
    expected = fit.x[0] * math.exp(-fit.x[1] * 70) + fit.x[2]
    assert forecast_loss(noisy.tolist(), 70) == pytest.approx(expected, abs=0.02)


def test_a_forecast_reads_the_steps_of_losses_that_are_far_apart():
    times = [10, 20, 30]
    losses = [math.exp(-t / 20) + 1 for t in times]
    assert forecast_loss(losses, 300, times) == pytest.approx(1.0, abs=0.01)
    assert forecast_loss([1.0, 1.0], 50) == pytest.approx(1.0)
    assert forecast_loss([3.0, 1.0], 50) >= 0


def test_smoothing_is_not_moved_by_outliers_at_the_beginning():
    curve = 3 * np.exp(-np.arange(60) / 30)
    noisy = curve + 0.02 * np.random.default_rng(1).standard_normal(60)
    noisy[[3, 11]] += 5.0
    assert np.abs(smooth_losses(noisy.tolist()) - curve).max() < 0.1
    short = [2.0, 9.0, 1.0]
    assert smooth_losses(short).tolist() == short


def test_values_are_those_of_a_gaussian_process():
    trials = [RateTrial(-4.0, 0.7), RateTrial(-2.5, 0.1, 2), RateTrial(-1.0, 2.0)]
    places = np.linspace(-5, -1, 9)

    def kernel(a, b):
        r = np.sqrt(5) * np.abs(np.subtract.outer(a, b)) / LENGTH_SCALE
        return PRIOR_VARIANCE * (1 + r + r**2 / 3) * np.exp(-r)

    x = np.array([trial.place for trial in trials])
    noise = np.diag([NOISE_VARIANCE + STAGE_VARIANCE * trial.age for trial in trials])
    inverse = np.linalg.inv(kernel(x, x) + noise)
    across = kernel(places, x)
    mean = 1 + across @ inverse @ np.array([trial.value - 1 for trial in trials])
    variance = PRIOR_VARIANCE - np.einsum("ij,jk,ik->i", across, inverse, across)
    found, deviation = predict_values(trials, places)
    assert found == pytest.approx(mean) and deviation == pytest.approx(np.sqrt(variance))
    bound = (mean - 1.5 * np.sqrt(variance)).min()
    proposed = propose_rate(trials, -5, -1, 1.5)
    assert -5 <= proposed <= -1
    [[at], [spread]] = predict_values(trials, [proposed])
    assert at - 1.5 * spread <= bound + 1e-9
    assert propose_rate([], -5, -1, 1.0) == -3


class Quadratic:
    """Gradient descent on a x^2 / 2 with noisy losses: it diverges with rates above 2 / a."""

    def __init__(self, steepness, seed=0):
        self.x, self.steepness, self.random = 1.0, steepness, random.Random(seed)

    def step(self, rate):
        noise = 1 + 0.05 * self.random.random()
        loss = self.steepness * min(self.x**2, 1e300) / 2 * noise + 1e-3
        self.x = max(-1e200, min(1e200, self.x * (1 - rate * self.steepness)))
        return loss if loss < 1e30 else math.nan


def play(problem, search, steps, at=None):
    """Losses, moves and kinds of steps; `at` this step the search is saved and loaded again."""
    moves, losses, kept, kinds = [search.begin()], [], None, []
    move = moves[0]
    for step in range(steps):
        if move is not None:
            kept = problem.x if move.keeps else kept
            problem.x = kept if move.restores else problem.x
        if step == at:
            state = json.loads(json.dumps(search.state(), allow_nan=False))
            search = search_of(steps)
            search.load_state(state)
        kinds.append("trial" if search.is_trial else "stage")
        rate = search.rate
        losses.append(problem.step(rate))
        move = search.observe(losses[-1])
        moves.append(move)
    if move is not None and move.restores:
        problem.x = kept
    return losses, moves, kinds


def search_of(steps, lowest=1e-5, highest=1e-1, first=None, trials=6, fall=0.1):
    return RateSearch(lowest, highest, steps, first, trials, fall)


def test_a_search_finds_a_rate_that_learns_within_its_steps():
    problem = Quadratic(50.0)
    losses, moves, kinds = play(problem, search_of(400), 400)
    assert kinds[0] == "trial" and kinds[-1] == "stage"
    assert kinds.count("trial") < 0.4 * len(kinds)
    assert losses[-1] < 0.01 * losses[0]
    assert moves[0].keeps and not moves[0].restores
    rates = [move.rate for move in moves if move is not None and (move.keeps or move.restores)]
    assert all(1e-6 < rate <= 0.1 for rate in rates)
    ends = [move.rate for move in moves[-30:-1] if move is not None]
    assert len(ends) > 20 and ends == sorted(ends, reverse=True), "it falls at the end"
    assert ends[-1] < 0.1 * ends[0]


@pytest.mark.parametrize("at", [3, 27, 150])
def test_a_search_that_is_saved_goes_on_as_it_would_have(at):
    whole = play(Quadratic(50.0), search_of(300), 300)
    assert play(Quadratic(50.0), search_of(300), 300, at) == whole


SILLY = [(1e-1, 10.0), (1e-12, 1e-9), (1.0, 100.0)]
RUNS = [(bounds, seed) for bounds in SILLY for seed in range(7)]


@pytest.mark.parametrize(("bounds", "seed"), RUNS[::7] + RUNS[1::3])
def test_a_search_in_a_silly_range_never_lets_training_diverge(bounds, seed):
    problem = Quadratic(100.0, seed)
    play(problem, search_of(200, *bounds), 200)
    assert abs(problem.x) <= 1.1
    if bounds[0] > 1e-3:
        assert problem.x < 0.5, "it fell back to rates that learn"


@pytest.mark.parametrize("loss", [9.0, math.nan])
def test_rows_that_are_hard_at_any_rate_do_not_stop_a_stage(loss):
    """A loss rises at the same step whatever the rate, because of its rows."""
    search, hard, place, kept = search_of(200), 45, 0, 0
    move, restarts, rates = search.begin(), 0, []
    for _ in range(200):
        if move is not None:
            kept = place if move.keeps else kept
            restarts += move.restores and not search.is_trial and place > kept
            place = kept if move.restores else place
        is_stage = not search.is_trial
        place += 1
        rates.append(search.rate)
        move = search.observe(loss if is_stage and place == hard else 1.0 / (1 + place / 50))
    assert place > 100, "it goes on"
    assert min(rates[:150]) > 1e-7


def test_settings_that_changed_count_in_a_search_that_goes_on():
    search, problem = search_of(400), Quadratic(50.0)
    play(problem, search, 40)
    other = search_of(400, lowest=1e-7, highest=1e-6)
    other.load_state(json.loads(json.dumps(search.state())))
    before = search.rate
    assert not {"lowest", "highest", "steps", "trials"} & set(search.state())
    move, tried = None, []
    for _ in range(360):
        move = other.observe(problem.step(other.rate))
        tried += [other.rate] if other.is_trial and move is not None and move.keeps else []
    assert tried and min(tried) < 0.5 * before, "rates of the new range, as far as in reach"


@pytest.mark.parametrize("steps", [40, 41, 57, 100, 1000])
@pytest.mark.parametrize("trials", [1, 2, 8, 20])
def test_stages_and_trials_take_the_steps_of_the_run(steps, trials):
    *_, kinds = play(Quadratic(10.0), search_of(steps, trials=trials), steps)
    assert kinds[-1] == "stage" and kinds.count("stage") >= steps / 3
    assert kinds[:MIN_TRIAL_STEPS] == ["trial"] * MIN_TRIAL_STEPS


def test_a_loss_that_is_no_number_ends_a_trial_at_once():
    search = search_of(200)
    search.begin()
    search.observe(1.0)
    move = search.observe(math.nan)
    assert move.restores and not move.keeps and search.last_forecast is None
    assert move.rate < 1e-3, "a lower one comes next"


def test_long_trials_are_judged_by_held_out_losses():
    search = search_of(400, first=120)
    search.begin()
    wanted = []
    for step in range(1, 13):
        if search.wants_validation:
            wanted.append(step)
            search.observe(5.0, math.exp(-step / 8) + 2.0)
        else:
            search.observe(5.0)
    assert wanted == [4, 8, 12]
    assert search.last_forecast == pytest.approx(2.0, abs=0.03)


def compared(other_loss, loss, other):
    """A search after its second stage has compared the rate of the first with `other` times it;
    that rate, and those of the trials."""
    search, rates = search_of(400, first=80, trials=1), []
    search.begin()
    while search.stage == 1:
        search.observe(1.0)
    before = 10**search._reached
    search._rate = other * before
    search._other = math.log10(search._rate)
    for held_out in (other_loss, loss):
        for _ in range(16):
            rates.append(search.rate)
            wanted = search.wants_validation
            move = search.observe(0.9, held_out if wanted else None)
            assert wanted == (len(rates) % 16 == 0), "at the end of each"
    assert not search.is_trial and move.rate == search.rate
    return search, before, rates, move


def test_later_stages_compare_one_other_rate_with_that_of_the_stage_before():
    search, before, rates, move = compared(0.5, 0.5, 0.6)
    trial = [1.0] * 10 + [left / 7 for left in range(6, 0, -1)]
    assert rates == pytest.approx([0.6 * before * t for t in trial] + [before * t for t in trial])
    assert not move.restores and search.rate == pytest.approx(before), "it goes on from its trial"


@pytest.mark.parametrize(
    ("other", "gain", "wins"), [(0.6, 0.15, False), (0.6, 0.25, True), (1.7, 0.1, True)]
)
def test_a_lower_rate_must_be_better_by_more(other, gain, wins):
    """The loss at the start of the stage is 1 and that of the better trial 0.5, so that the gain
    is 0.5."""
    search, before, _, move = compared(0.5, 0.5 + 0.5 * gain, other)
    assert search.rate == pytest.approx(other * before if wins else before)
    assert move.restores == wins


@pytest.mark.parametrize("fall", [0.1, 0.4, 0.6])
@pytest.mark.parametrize("steps", [100, 320, 1000])
def test_no_rate_is_tried_where_the_rate_falls(steps, fall):
    *_, kinds = play(Quadratic(10.0), search_of(steps, fall=fall), steps)
    assert set(kinds[-round(fall * steps) :]) == {"stage"}


def test_of_rates_that_are_about_as_good_the_first_stage_takes_the_lowest():
    trials = [RateTrial(-5.0, 1.0), RateTrial(-4.0, 0.02), RateTrial(-3.0, 0.0), RateTrial(-2, 1)]
    places = np.linspace(-5, -1, 129)
    mean, _ = predict_values(trials, places)
    found = find_lowest_good_rate(trials, -5, -1, 0.03)
    assert found == places[mean <= mean.min() + 0.03].min()
    assert -4.2 < found < propose_rate(trials, -5, -1, 0.0)


def test_where_nothing_is_learned_yet_the_first_stage_takes_the_highest_rate_that_does_no_harm():
    """As reward models, whose loss stays at log 2 for tens of steps."""
    search, tried = search_of(400, trials=8), []
    search.begin()
    while search.is_trial:
        tried.append(rate := search.rate)
        is_first = len(tried) % MIN_TRIAL_STEPS == 1
        search.observe(0.7 if is_first or rate < 5e-4 else 0.75)
    assert search.rate == max(rate for rate in tried if rate < 5e-4)
    assert 1e-4 < search.rate < max(tried)


@pytest.mark.parametrize("worst", [None, 2.0, 0.75])
def test_a_rate_that_did_harm_is_not_taken_however_bad_others_are(worst):
    search = search_of(400)
    search.begin()
    search.observe(0.693)
    search._forecasts = [(-5.0, 0.6929), (-4.0, 0.692), (-3.0, 0.74), (-2.0, worst)]
    search._end_search()
    assert search.rate == pytest.approx(1e-4)


def test_the_only_rate_that_is_tried_is_taken():
    search = search_of(400, trials=1)
    search.begin()
    move = None
    for step in range(MIN_TRIAL_STEPS):
        move = search.observe(1 - step / 10)
    assert search.rate == pytest.approx(1e-3) and not search.is_trial and not move.restores


def test_a_search_saved_in_trials_as_they_were_once_goes_on_with_its_stage():
    """Later stages of checkpoints from before 28 November 2026 have up to 4 trials."""
    search = search_of(400)
    search.begin()
    for _ in range(400):
        if search.stage < 2:
            search.observe(1.0)
    old = json.loads(json.dumps(search.state())) | {"left": 3, "forecasts": [[-3.0, 0.8]]}
    before = 10 ** old["reached"]
    del old["other"]
    again = search_of(400)
    move = again.load_state(old)
    assert move.restores and move.rate == again.rate == pytest.approx(before)
    assert not again.is_trial and again.stage == 2
    for _ in range(400 - old["done"]):
        assert 0 < again.rate < 0.1
        again.observe(0.8)
    assert again._done == 400


def test_later_trials_explore_less_and_the_best_rate_is_chosen_without(monkeypatch):
    explored = []

    def propose(trials, lowest, highest, kappa):
        explored.append(kappa)
        return -4.5 + 0.5 * len(explored)  # no two alike

    monkeypatch.setattr("hybridrl.algorithms.rate_search.propose_rate", propose)
    search = search_of(400, trials=4)
    search.begin()
    while search.is_trial:
        search.observe(1.0)
    assert explored == pytest.approx([2.0, 1.5, 1.0, 0.5])


def test_at_the_end_the_rate_falls_in_equal_steps():
    search, rates = search_of(200, fall=0.05), []
    search.begin()
    for _ in range(200):
        rates.append(search.rate)
        search.observe(1.0)
    assert rates[-10:] == pytest.approx([rates[-11] * left / 11 for left in range(10, 0, -1)])


OPTIMIZERS = [
    OptimizerConfig(learning_rate=0.03, schedule="auto"),
    pytest.param(
        OptimizerConfig(learning_rate=0.03, schedule="auto", moments="int8"),
        marks=pytest.mark.more,
    ),
    pytest.param(
        OptimizerConfig(learning_rate=0.03, schedule="auto", name="adafactor"),
        marks=pytest.mark.more,
    ),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 2])
def test_a_snapshot_brings_back_weights_moments_and_position(mesh, optimizer, before):
    engine = make_engine(mesh)
    engine.start_optimizer(optimizer, 10)
    batch = make_batch()

    def learn(steps):
        return [engine.update(batch, CLIPPED, temperature=TEMPERATURE) for _ in range(steps)]

    learn(before)
    kept = TrainingSnapshot(engine)
    expected = learn(3)
    weights = {name: part.clone() for name, part in engine.local_parameters().items()}
    engine.set_learning_rate(0.5)
    learn(2)
    with kept.in_place():
        assert engine.schedule.last_epoch == before
    assert engine.schedule.last_epoch == before + 5
    kept.restore()
    engine.set_learning_rate(0.03)
    assert learn(3) == expected
    assert all(part.equal(weights[name]) for name, part in engine.local_parameters().items())


def test_a_rate_that_is_set_is_that_of_the_next_update(mesh):
    engine = make_engine(mesh)
    engine.start_optimizer(OptimizerConfig(schedule="auto", warmup_steps=9), 10)
    engine.set_learning_rate(0.25)
    found = [engine.update(make_batch(), CLIPPED, temperature=TEMPERATURE) for _ in range(2)]
    assert [metrics["learning_rate"] for metrics in found] == [0.25, 0.25]
    assert {group["lr"] for group in engine.optimizer.param_groups} == {0.25}


AUTO = "actor.optimizer.schedule=auto"
BASE = ["rollout=transformers", "devices=cpu", AUTO]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["algorithm=grpo"], "learns from samples that its policy draws"),
        (["algorithm=sft", "trainer.steps=20"], "trainer.steps=20 with"),
        (
            ["algorithm=sft", "actor.optimizer.learning_rate_range=[0.1,0.01]"],
            "the lower one first",
        ),
        (["algorithm=sft", "checkpoint.memory_copies=1"], "copies lack the start of the stage"),
        (
            ["algorithm=dpo", "models.reference.optimizer.schedule=cosine"],
            "all models of a job search",
        ),
    ],
)
def test_jobs_that_cannot_search_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        check(configured([*BASE, "trainer.steps=100", *settings]))
