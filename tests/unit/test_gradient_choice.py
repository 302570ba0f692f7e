"""Which way each unit's gradients are summed."""

import json
from dataclasses import asdict

import pytest
from choice_cases import least, line, random_case, way

from hybridrl.parallel.reduction_choice import (
    FULL_REDUCTION,
    CostCurve,
    GradientBucket,
    HopCost,
    MethodCost,
    choose_methods,
    predict_backward_seconds,
)

WAYS = [way(FULL_REDUCTION), way("int8", 0.3, 4e6), way("int4", 0.5, 7.5e6)]


@pytest.mark.more
def test_a_choice_is_as_quick_as_the_quickest_of_all():
    close = 0
    for seed in range(200):
        buckets, ways, beside = random_case(seed)
        choice = choose_methods(buckets, ways, beside)
        by_name = {one.name: one for one in ways}
        taken = predict_backward_seconds(buckets, [by_name[name] for name in choice.ways], beside)
        assert taken == pytest.approx(choice.seconds)
        close += taken <= 1.03 * least(buckets, ways, beside)
    assert close == 200


def test_in_order_everything_adds_up():
    buckets = [GradientBucket(1_000_000, 1.0), GradientBucket(2_000_000, 1.5)]
    assert predict_backward_seconds(buckets, [WAYS[0]] * 2, beside=False) == pytest.approx(
        1.5 + 3.0
    )
    assert predict_backward_seconds(buckets, [WAYS[1]] * 2, beside=False) == pytest.approx(
        1.5 + 3 * (0.3 + 0.25)
    )


def test_beside_the_backward_only_what_is_longer_counts():
    buckets = [GradientBucket(1_000_000, 1.0), GradientBucket(1_000_000, 4.0)]
    # The first sum ends at 2, long before the second begins at 4.
    assert predict_backward_seconds(buckets, [WAYS[0]] * 2, beside=True) == pytest.approx(5.0)
    # Encoding the first takes from the backward what it takes itself.
    assert predict_backward_seconds(buckets, [WAYS[1], WAYS[0]], beside=True) == pytest.approx(5.3)
    # The backward waits with the second until the first is summed: at 1 + 10.
    slow = [GradientBucket(10_000_000, 1.0), GradientBucket(1_000_000, 4.0)]
    assert predict_backward_seconds(slow, [WAYS[0]] * 2, beside=True) == pytest.approx(12.0)


def test_what_ends_before_a_bubble_is_left_as_it_is():
    buckets = [GradientBucket(1_000_000, 1.0), GradientBucket(1_000_000, 4.0)]
    assert choose_methods(buckets, WAYS, beside=True).ways == (FULL_REDUCTION, "int8")
    assert choose_methods(buckets, WAYS, beside=False).ways == ("int8", "int8")


def test_nothing_is_encoded_where_nothing_is_gained():
    fast = [way(FULL_REDUCTION, link=1e9), way("int8", 0.3, 4e9), way("int4", 0.5, 7.5e9)]
    choice = choose_methods([GradientBucket(1_000_000)] * 3, fast, beside=False)
    assert choice.ways == (FULL_REDUCTION,) * 3
    assert choice.of_full == 1
    assert "nothing else" in choice.sentence()


def test_of_ways_that_are_alike_the_first_is_taken():
    alike = [way(FULL_REDUCTION), way("int8", 0.0, 1.01e6), way("int4", 0.0, 1.015e6)]
    assert choose_methods([GradientBucket(1_000_000)], alike, beside=False).ways == (
        FULL_REDUCTION,
    )


def test_small_units_may_go_as_they_are_beside_large_ones():
    ways = [way(FULL_REDUCTION), way("int8", 0.1, 4e6, alpha=0.01)]
    choice = choose_methods(
        [GradientBucket(1_000), GradientBucket(9_000_000), GradientBucket(1_000)],
        ways,
        beside=False,
    )
    assert choice.ways == (FULL_REDUCTION, "int8", FULL_REDUCTION)
    assert choice.sentence().startswith(
        "full for 2 of 3 units, int8 for 1: sums are expected to take 0.35"
    )


def test_hops_add_up_each_with_its_share():
    codec, link = line(0.1, 1e6), line(0.0, 1e7)
    two = MethodCost("int8+int4", (HopCost(1.0, codec, link), HopCost(0.25, codec, link)))
    assert two.codec(4e6) == pytest.approx(0.1 + 4 + 0.1 + 1)
    assert two.link(4e6) == pytest.approx(0.4 + 0.1)


@pytest.mark.parametrize(
    ("values", "seconds"), [(0, 0.0), (100, 1.0), (150, 2.0), (200, 3.0), (400, 7.0)]
)
def test_a_curve_is_straight_between_points_and_beyond_them(values, seconds):
    assert CostCurve(((100, 1.0), (200, 3.0)))(values) == pytest.approx(seconds)


def test_a_choice_is_plain_data():
    choice = choose_methods([GradientBucket(5)] * 2, WAYS, beside=False)
    assert json.loads(json.dumps(asdict(choice)))["ways"] == list(choice.ways)


def test_no_units_are_no_time():
    choice = choose_methods([], WAYS, beside=False)
    assert choice.ways == () and choice.seconds == 0 and choice.of_full == 1
