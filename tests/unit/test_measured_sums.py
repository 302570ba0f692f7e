"""`parallel.gradients=auto` while a job runs: what it learns of its sums, on clocks made up."""

import itertools

import pytest
import torch
from choice_cases import line

from hybridrl.parallel import measured_reduction as measured_sums
from hybridrl.parallel.measured_reduction import (
    CALM_UPDATES,
    DRIFTED_UPDATES,
    SETTLING_UPDATES,
    MeasuredReduceScatter,
)
from hybridrl.parallel.reduction_choice import (
    FULL_REDUCTION,
    ZERO_COST,
    GradientBucket,
    HopCost,
    MethodCost,
    choose_methods,
)


class At:
    """A moment of a clock that is told the time."""

    def __init__(self, seconds):
        self.seconds = seconds

    def since(self, earlier):
        return self.seconds - earlier.seconds


class Unit:
    def set_custom_reduce_scatter(self, sums):
        self.sums = sums


def ways(rate):
    """`full` at a million values a second times `rate`, and 8 bits, which have to be encoded."""
    full = HopCost(1.0, ZERO_COST, line(0.0, 1e6 * rate))
    return [
        MethodCost(FULL_REDUCTION, (full,)),
        MethodCost("int8", (HopCost(1.0, line(0.0, 1e7), line(0.0, 4e6 * rate)),)),
    ]


@pytest.fixture
def link(monkeypatch):
    """Its rate, which a test may change; sums are measured by it, and all ranks are this one."""
    rate = {"now": 1.0}
    monkeypatch.setattr(measured_sums, "measure_methods", lambda *_: ways(rate["now"]))
    monkeypatch.setattr(measured_sums, "all_reduce_figures", lambda figures, *_: list(figures))
    return rate


def installed(values, beside=False):
    sums = MeasuredReduceScatter({}, None, torch.device("cpu"))
    sums._beside = beside
    units = [Unit() for _ in values]
    sums.install(units, values)
    assert [unit.sums for unit in units] == sums.units
    return sums


def run(sums, link, order, gaps):
    """An update whose backward reaches the units in `order`, `gaps` seconds apart."""
    now = free = 0.0
    chosen = dict(zip(sums._order, sums.choice.ways, strict=True))
    for unit, gap in zip(order, gaps, strict=True):
        begin = max(now, free)
        (way,) = (way for way in ways(link["now"]) if way.name == chosen[unit])
        values = sums._values[unit]
        free = begin + way.codec(values) + way.link(values)
        sums.note(unit, At(begin), At(begin), At(free))
        now = begin + gap
    sums.after_update()


def test_beside_a_backward_bubbles_are_seen_once_sums_are_short(link):
    values, order, gaps = [1_000_000] * 4, [3, 2, 1, 0], [2.0, 0.5, 5.0, 0.0]
    sums = installed(values, beside=True)
    assert sums.choice.ways == ("int8",) * 4
    for _ in range(SETTLING_UPDATES):
        run(sums, link, order, gaps)
    ready = [0.0, 2.0, 2.5, 7.5]
    buckets = [GradientBucket(values[unit], at) for unit, at in zip(order, ready, strict=True)]
    assert sums.choice.ways == choose_methods(buckets, ways(1.0), beside=True).ways
    assert sums.choice.ways == (FULL_REDUCTION, "int8", FULL_REDUCTION, "int8")
    assert sums._order == order
    assert len(sums.said) == 2 and "backward and sums" in sums.said[1]


def test_sums_as_long_as_was_measured_are_left_alone(link):
    sums = installed([1_000_000, 10])
    for _ in range(2 * CALM_UPDATES):
        run(sums, link, [1, 0], [0.1, 0.1])
    assert sums.measurements == 1 and len(sums.said) == 1


@pytest.mark.parametrize(("rate", "way"), [(0.5, "int8"), (100.0, FULL_REDUCTION)])
def test_a_link_that_becomes_slower_or_faster_is_measured_again(link, rate, way):
    sums = installed([1_000_000])
    link["now"] = rate
    for number in range(DRIFTED_UPDATES):
        assert sums.measurements == 1
        run(sums, link, [0], [0.0])
        assert number == DRIFTED_UPDATES - 1 or sums.choice.ways == ("int8",)
    assert sums.measurements == 2
    assert sums.choice.ways == (way,)
    assert "measured again" in sums.said[-1]


def test_a_slow_update_now_and_then_is_no_drift(link):
    sums = installed([1_000_000])
    for number in range(60):
        link["now"] = 0.2 if number % 3 else 1.0
        run(sums, link, [0], [0.0])
    assert sums.measurements == 1


def test_what_takes_next_to_no_time_is_not_measured_again(link, monkeypatch):
    hours = itertools.count(0, 3600)
    monkeypatch.setattr(measured_sums.time, "monotonic", lambda: next(hours))
    sums = installed([1_000_000])
    link["now"] = 0.4
    for _ in range(10):
        run(sums, link, [0], [0.0])
    assert sums.measurements == 1


def test_what_measuring_does_not_see_is_not_measured_for_ever(link, monkeypatch):
    sums = installed([1_000_000])
    monkeypatch.setattr(measured_sums, "measure_methods", lambda *_: ways(1.0))
    link["now"] = 0.4  # but while it is measured
    for _ in range(CALM_UPDATES):
        run(sums, link, [0], [0.0])
    assert sums.measurements == 2
    for _ in range(CALM_UPDATES):
        run(sums, link, [0], [0.0])
    assert sums.measurements == 3


def test_updates_without_sums_say_nothing(link):
    sums = installed([1_000])
    sums.after_update()
    assert sums.measurements == 1
