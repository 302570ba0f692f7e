"""Partition and packing: every row once, within bounds, the same each time."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.batch.row_balancing import balance_rows
from hybridrl.engine.micro_batches import pack_rows
from hybridrl.errors import ConfigError

costs = st.lists(st.integers(0, 1000), max_size=40)


def sums(costs, lists):
    return [sum(costs[row] for row in rows) for rows in lists]


def spread(costs, lists):
    totals = sums(costs, lists)
    return max(totals) - min(totals)


@given(costs, st.integers(1, 6))
def test_rows_that_stay_nearby_are_even_too(costs, parts):
    lists = balance_rows(costs, parts)
    assert sorted(itertools.chain(*lists)) == list(range(len(costs)))
    assert len(lists) == parts and all(rows == sorted(rows) for rows in lists)
    assert spread(costs, lists) <= max(costs, default=0)
    assert lists == balance_rows(costs, parts)


def test_most_rows_stay_nearby():
    parts, each = 256, 8
    costs = np.random.default_rng(0).integers(20, 400, parts * each)
    lists = balance_rows(costs, parts)
    assert max(sums(costs, lists)) <= 1.02 * costs.sum() / parts
    blocks = [len({row // each for row in rows}) for rows in lists]
    assert sum(blocks) / parts < 2.5


def test_partition_refuses_what_it_cannot_do():
    with pytest.raises(ConfigError, match="0 parts"):
        balance_rows([1], 0)
    with pytest.raises(ConfigError, match="Row 1 has a cost of nan"):
        balance_rows([1.0, float("nan")], 2)
    with pytest.raises(ConfigError, match="Row 0 has a cost of -1"):
        balance_rows([-1.0], 2)


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(50, 120))
def test_pack_is_first_fit_decreasing(lengths, budget):
    lists = pack_rows(lengths, budget)
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
    assert pack_rows([6, 5, 5, 4], 10) == [[0, 3], [1, 2]]
    assert pack_rows([10, 10], 10) == [[0], [1]]
    assert pack_rows([], 10) == []
    assert pack_rows([0, 0], 10) == [[0, 1]]


def test_pack_names_the_row_and_the_setting():
    with pytest.raises(ConfigError, match=r"Row 1 has 11 tokens.*`actor.tokens_per_microbatch`"):
        pack_rows([3, 11], 10)
    with pytest.raises(ConfigError, match=r"`critic.tokens_per_microbatch` = 10"):
        pack_rows([11], 10, setting="critic.tokens_per_microbatch")
    with pytest.raises(ConfigError, match="length of -1"):
        pack_rows([-1], 10)
