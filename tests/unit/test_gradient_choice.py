"""Which way each unit's gradients are summed."""

import json
import math
from dataclasses import asdict

import pytest
from choice_cases import least, random_case, way

from hybridrl.errors import ConfigError
from hybridrl.parallel.reduction_choice import (
    FULL,
    IN_ORDER,
    ON_A_STREAM,
    Bucket,
    Curve,
    Overlap,
    Part,
    Way,
    choose,
    seconds_of,
)

WAYS = [way(FULL), way("int8", 0.3, 4e6), way("int4", 0.5, 7.5e6)]


@pytest.mark.more
def test_a_choice_is_as_quick_as_the_quickest_of_all():
    close = 0
    for seed in range(200):
        buckets, ways, overlap = random_case(seed)
        choice = choose(buckets, ways, overlap)
        by_name = {one.name: one for one in ways}
        taken = seconds_of(buckets, [by_name[name] for name in choice.ways], overlap)
        assert taken == pytest.approx(choice.seconds)
        close += taken <= 1.03 * least(buckets, ways, overlap)
    assert close == 200


def test_in_order_everything_adds_up():
    buckets = [Bucket(1_000_000, 1.0), Bucket(2_000_000, 1.5)]
    assert seconds_of(buckets, [WAYS[0]] * 2, IN_ORDER) == pytest.approx(1.5 + 3.0)
    assert seconds_of(buckets, [WAYS[1]] * 2, IN_ORDER) == pytest.approx(1.5 + 3 * (0.3 + 0.25))


def test_beside_the_backward_only_what_is_longer_counts():
    buckets = [Bucket(1_000_000, 1.0), Bucket(1_000_000, 4.0)]
    # The first sum ends at 2, long before the second begins at 4.
    assert seconds_of(buckets, [WAYS[0]] * 2, ON_A_STREAM) == pytest.approx(5.0)
    # Encoding the first takes from the backward what it takes itself.
    assert seconds_of(buckets, [WAYS[1], WAYS[0]], ON_A_STREAM) == pytest.approx(5.3)
    free = Overlap(beside=True)
    assert seconds_of(buckets, [WAYS[1], WAYS[0]], free) == pytest.approx(5.0)
    # The backward waits with the second until the first is summed: at 1 + 10.
    slow = [Bucket(10_000_000, 1.0), Bucket(1_000_000, 4.0)]
    assert seconds_of(slow, [WAYS[0]] * 2, ON_A_STREAM) == pytest.approx(12.0)


def test_what_ends_before_a_bubble_is_left_as_it_is():
    buckets = [Bucket(1_000_000, 1.0), Bucket(1_000_000, 4.0)]
    assert choose(buckets, WAYS, ON_A_STREAM).ways == (FULL, "int8")
    assert choose(buckets, WAYS, IN_ORDER).ways == ("int8", "int8")


def test_nothing_is_encoded_where_nothing_is_gained():
    fast = [way(FULL, link=1e9), way("int8", 0.3, 4e9), way("int4", 0.5, 7.5e9)]
    choice = choose([Bucket(1_000_000)] * 3, fast, IN_ORDER)
    assert choice.ways == (FULL,) * 3
    assert choice.of_full == 1
    assert "nothing else" in choice.sentence()


def test_of_ways_that_are_alike_the_first_is_taken():
    alike = [way(FULL), way("int8", 0.0, 1.01e6), way("int4", 0.0, 1.015e6)]
    assert choose([Bucket(1_000_000)], alike, IN_ORDER).ways == (FULL,)


def test_small_units_may_go_as_they_are_beside_large_ones():
    ways = [way(FULL), way("int8", 0.1, 4e6, alpha=0.01)]
    choice = choose([Bucket(1_000), Bucket(9_000_000), Bucket(1_000)], ways, IN_ORDER)
    assert choice.ways == (FULL, "int8", FULL)
    assert choice.sentence().startswith(
        "full for 2 of 3 units, int8 for 1: sums are expected to take 0.35"
    )


def test_hops_add_up_each_with_its_share():
    codec, link = Curve.of(0.1, 1e6), Curve.of(0.0, 1e7)
    two = Way("int8+int4", (Part(1.0, codec, link), Part(0.25, codec, link)))
    assert two.codec(4e6) == pytest.approx(0.1 + 4 + 0.1 + 1)
    assert two.link(4e6) == pytest.approx(0.4 + 0.1)


@pytest.mark.parametrize(
    ("values", "seconds"), [(0, 0.0), (100, 1.0), (150, 2.0), (200, 3.0), (400, 7.0)]
)
def test_a_curve_is_straight_between_points_and_beyond_them(values, seconds):
    assert Curve(((100, 1.0), (200, 3.0)))(values) == pytest.approx(seconds)


def test_a_choice_is_plain_data():
    choice = choose([Bucket(5)] * 2, WAYS, IN_ORDER)
    assert json.loads(json.dumps(asdict(choice)))["ways"] == list(choice.ways)


def test_no_units_are_no_time():
    choice = choose([], WAYS, IN_ORDER)
    assert choice.ways == () and choice.seconds == 0 and choice.of_full == 1


@pytest.mark.parametrize(
    ("buckets", "ways", "said"),
    [
        ([Bucket(1)], WAYS[1:], "`full`"),
        ([Bucket(1), Bucket(-1)], WAYS, "unit 1 of -1"),
        ([Bucket(1, math.nan)], WAYS, "not a number"),
        ([Bucket(1)], [*WAYS, way("int2", math.nan)], "not a number"),
        ([Bucket(1, 2.0), Bucket(1, 1.0)], WAYS, "before the one before it"),
    ],
)
def test_what_nothing_can_be_chosen_from_is_refused_in_a_sentence(buckets, ways, said):
    with pytest.raises(ConfigError, match=said):
        choose(buckets, ways, IN_ORDER)
