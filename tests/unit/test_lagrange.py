"""The multiplier of a constraint: it finds its way and never runs away."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms import LagrangeMultiplier
from hybridrl.errors import ConfigError

NONE = torch.tensor([math.nan, math.nan])


def costs(share, of=10):
    """So large a share of the samples cost 1, the others 0."""
    return (torch.arange(of) < share * of).float()


def after(multiplier, *batches):
    for batch in batches:
        multiplier.update(batch)
    return multiplier.value


def test_it_rises_above_the_limit_and_falls_below():
    multiplier = LagrangeMultiplier(0.5, limit=0.2, rate=0.1)
    # 0.6 of the samples cost 1: on average 0.4 too much, of sqrt(0.6 * 0.8^2 + 0.4 * 0.2^2).
    step = 0.1 * 0.5 * 0.4 / math.sqrt(0.4)
    assert after(multiplier, costs(0.6)) == pytest.approx(0.5 * math.exp(step))
    before = multiplier.value
    assert 0 < after(multiplier, *[costs(0.0)] * 4) < before
    balanced = LagrangeMultiplier(0.5, limit=0.2, rate=0.1)
    assert after(balanced, costs(0.2)) == pytest.approx(0.5)


def test_the_violation_is_averaged_over_the_last_updates():
    multiplier = LagrangeMultiplier(0.5, limit=0.5, rate=0.1)
    assert after(multiplier, costs(1.0), costs(1.0), costs(0.0)) > after(
        LagrangeMultiplier(0.5, limit=0.5, rate=0.1), costs(1.0), costs(1.0)
    )


def test_the_violation_is_one_at_most_over_any_number_of_updates():
    multiplier = LagrangeMultiplier(1.0, limit=0.0, rate=0.1)
    for update in range(1, 9):  # all costs are as far above the limit
        assert after(multiplier, costs(1.0)) == pytest.approx(math.exp(0.1 * update))


def test_it_never_exceeds_its_cap_and_comes_down_at_once():
    multiplier = LagrangeMultiplier(0.5, limit=0.3, rate=0.5)
    assert after(multiplier, *[costs(0.9)] * 1000) == 10.0
    steps = 0
    while multiplier.value > 1.0:
        multiplier.update(costs(0.1))
        steps += 1
    assert steps < 20


def test_above_one_the_step_does_not_grow_with_the_value():
    ratios = []
    for initial in (1.0, 2.0, 4.0):
        multiplier = LagrangeMultiplier(initial, limit=0.3, rate=0.1)
        ratios.append(after(multiplier, costs(0.9)) / initial)
    assert ratios == pytest.approx([ratios[0]] * 3)
    small = LagrangeMultiplier(0.1, limit=0.3, rate=0.1)
    assert 1 < after(small, costs(0.9)) / 0.1 < ratios[0]


@given(
    st.lists(st.lists(st.integers(-5, 5), min_size=1, max_size=6), min_size=1, max_size=9),
    st.integers(-3, 3),
    st.sampled_from([1e-4, 0.1, 3.0, 1e5]),
)
def test_the_unit_of_the_cost_changes_nothing(batches, limit, unit):
    mine, other = LagrangeMultiplier(0.5, limit, 0.3), LagrangeMultiplier(0.5, limit * unit, 0.3)
    for batch in batches:
        mine.update(torch.tensor(batch, dtype=torch.float64))
        other.update(torch.tensor(batch, dtype=torch.float64) * unit)
        assert other.value == pytest.approx(mine.value)


@pytest.mark.parametrize("wild", [1e9, -1e9, math.inf, math.nan])
def test_one_strange_batch_cannot_decide(wild):
    multiplier = LagrangeMultiplier(2.0, limit=0.0, rate=0.5)
    value = after(multiplier, torch.tensor([wild, wild]))
    assert 2.0 * math.exp(-0.5) - 1e-9 <= value <= 2.0 * math.exp(0.5) + 1e-9


@pytest.mark.parametrize("nothing", [NONE, torch.zeros(0), torch.tensor([0.3])])
def test_without_costs_or_at_the_limit_it_stays(nothing):
    multiplier = LagrangeMultiplier(2.0, limit=torch.tensor([0.3]).item(), rate=1.0)
    assert after(multiplier, nothing) == 2.0
    assert after(multiplier, costs(0.9)) > 2.0


def test_dropped_samples_do_not_count():
    mine, other = (LagrangeMultiplier(0.5, 0.2, 0.1) for _ in range(2))
    mine.update(torch.cat([NONE, costs(0.6)]))
    other.update(costs(0.6))
    assert mine.value == other.value


def test_a_later_job_goes_on_where_it_was():
    begun, whole = (LagrangeMultiplier(0.5, 0.2, 0.1) for _ in range(2))
    first, then = [costs(0.6), costs(0.9), costs(0.1)], [costs(0.0), costs(0.7), costs(0.2)]
    after(begun, *first)
    resumed = LagrangeMultiplier(0.5, 0.2, 0.1)
    resumed.load_state(json.loads(json.dumps(begun.state())))
    assert after(resumed, *then) == after(whole, *first, *then)


@pytest.mark.parametrize("initial", [0.0, -1.0, 10.5])
def test_the_first_multiplier_is_positive_and_below_the_cap(initial):
    with pytest.raises(ConfigError, match="first `multiplier`"):
        LagrangeMultiplier(initial, 0.0, 0.1)
