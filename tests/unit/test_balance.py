"""Partition and packing: every row once, within bounds, the same each time."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.batch.row_balancing import pack, partition, partition_nearby, sample_cost
from hybridrl.errors import ConfigError

costs = st.lists(st.integers(0, 1000), max_size=40)


def sums(costs, lists):
    return [sum(costs[row] for row in rows) for rows in lists]


def spread(costs, lists):
    totals = sums(costs, lists)
    return max(totals) - min(totals)


@given(costs, st.integers(1, 12))
def test_partition_holds_every_row_once_and_is_even(costs, parts):
    lists = partition(costs, parts)
    assert len(lists) == parts
    assert sorted(itertools.chain(*lists)) == list(range(len(costs)))
    assert all(rows == sorted(rows) for rows in lists)
    assert spread(costs, lists) <= max(costs, default=0)
    assert lists == partition(costs, parts)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=10), st.integers(1, 4))
def test_equal_count_gives_lists_of_one_length(costs, parts):
    costs = costs * parts
    lists = partition(costs, parts, equal_count=True)
    assert [len(rows) for rows in lists] == [len(costs) // parts] * parts
    assert sorted(itertools.chain(*lists)) == list(range(len(costs)))
    ordered = sorted(costs, reverse=True)
    chunks = [ordered[i : i + parts] for i in range(0, len(ordered), parts)]
    assert spread(costs, lists) <= max(chunk[0] - chunk[-1] for chunk in chunks)


@given(costs, st.integers(1, 6))
def test_rows_that_stay_nearby_are_even_too(costs, parts):
    lists = partition_nearby(costs, parts)
    assert sorted(itertools.chain(*lists)) == list(range(len(costs)))
    assert len(lists) == parts and all(rows == sorted(rows) for rows in lists)
    assert spread(costs, lists) <= max(costs, default=0)
    assert lists == partition_nearby(costs, parts)


def test_most_rows_stay_nearby():
    parts, each = 256, 8
    costs = np.random.default_rng(0).integers(20, 400, parts * each)
    lists = partition_nearby(costs, parts)
    assert max(sums(costs, lists)) <= 1.02 * costs.sum() / parts
    blocks = [len({row // each for row in rows}) for rows in lists]
    assert sum(blocks) / parts < 2.5


def test_partition_by_hand():
    # The classic example of Karmarkar and Karp: 8, 7, 6, 5, 4 differ by 2 at the end, not by 4.
    assert spread([8, 7, 6, 5, 4], partition([8, 7, 6, 5, 4], 2)) == 2
    assert partition([3, 3, 3, 3], 2) == partition([3.0, 3.0, 3.0, 3.0], 2)
    assert sorted(map(len, partition([3, 3, 3, 3], 2))) == [2, 2]
    assert partition([5, 9], 4) == [[1], [0], [], []]
    assert partition([], 3) == [[], [], []]
    assert partition([], 3, equal_count=True) == [[], [], []]


def test_partition_comes_close_to_the_best_of_all():
    costs = [97, 83, 71, 64, 52, 41, 33, 20]
    best = min(
        max(sums(costs, [[i for i in range(8) if owner[i] == part] for part in range(3)]))
        for owner in itertools.product(range(3), repeat=8)
    )
    assert max(sums(costs, partition(costs, 3))) <= 1.06 * best


def test_a_large_batch_is_nearly_even():
    costs = [sample_cost(1 + (row * 7919) % 8192, 1.0, 1e-3) for row in range(1024)]
    for parts in (8, 64):
        totals = sums(costs, partition(costs, parts))
        assert max(totals) < 1.005 * min(totals)


def test_partition_refuses_what_it_cannot_do():
    with pytest.raises(ConfigError, match="5 rows cannot be divided into 2 lists"):
        partition([1] * 5, 2, equal_count=True)
    with pytest.raises(ConfigError, match="0 parts"):
        partition([1], 0)
    with pytest.raises(ConfigError, match="Row 1 has a cost of nan"):
        partition([1.0, float("nan")], 2)
    with pytest.raises(ConfigError, match="Row 0 has a cost of -1"):
        partition([-1.0], 2)


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(50, 120))
def test_pack_is_first_fit_decreasing(lengths, budget):
    lists = pack(lengths, budget)
    assert sorted(itertools.chain(*lists)) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= budget for rows in lists)
    slow: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        for rows in slow:
            if sum(lengths[other] for other in rows) + lengths[row] <= budget:
                rows.append(row)
                break
        else:
            slow.append([row])
    assert lists == [sorted(rows) for rows in slow]


def test_pack_by_hand():
    assert pack([6, 5, 5, 4], 10) == [[0, 3], [1, 2]]
    assert pack([10, 10], 10) == [[0], [1]]
    assert pack([], 10) == []
    assert pack([0, 0], 10) == [[0, 1]]


def test_pack_names_the_row_and_the_setting():
    with pytest.raises(ConfigError, match=r"Row 1 has 11 tokens.*`actor.tokens_per_microbatch`"):
        pack([3, 11], 10)
    with pytest.raises(ConfigError, match=r"`critic.tokens_per_microbatch` = 10"):
        pack([11], 10, setting="critic.tokens_per_microbatch")
    with pytest.raises(ConfigError, match="length of -1"):
        pack([-1], 10)


def test_sample_cost():
    assert sample_cost(10, linear=2.0, quadratic=0.5) == 70.0
