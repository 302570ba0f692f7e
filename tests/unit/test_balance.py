"""Partition and packing: every row once, within bounds, the same each time."""

import itertools
import math

import numpy as np
import pytest
import torch
import transformers
from at_size import QWEN3_8B, QWEN3_30B_A3B, SMALL
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.batch.row_balancing import balance_rows
from hybridrl.controller.row_selections import PartitionSelection
from hybridrl.engine.micro_batches import pack_rows
from hybridrl.errors import ConfigError
from hybridrl.models.model_shape import find_attention_length

SMALL_WITH_WINDOWS = SMALL | {"layer_types": ["sliding_attention", "full_attention"] * 2}
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


class Lengths:
    """Stands in for a table of rows of so many tokens."""

    def __init__(self, tokens):
        self.of_rows = tokens

    def num_rows(self):
        return len(self.of_rows)

    def tokens(self):
        return {"response_ids": self.of_rows}


@pytest.mark.parametrize(("ranks", "each"), [(8, 64), (16, 32), (32, 32)])
def test_ranks_are_dealt_equal_work_where_a_few_samples_are_very_long(ranks, each):
    """Up to 128k tokens, by the work of a model of 8 billion parameters. Where rows are dealt by
    tokens alone, ranks differ by 1.5 times and more."""
    drawn = np.random.default_rng(0).lognormal(9.0, 1.2, ranks * each)
    tokens = drawn.clip(100, 131_072).astype(np.int64)

    def work(attention_length):
        table = Lengths(tokens)
        dealt = [
            PartitionSelection(rank, ranks, "tokens", 1, attention_length).rows(table)
            for rank in range(ranks)
        ]
        assert sorted(np.concatenate(dealt).tolist()) == list(range(len(tokens)))
        return [float((24_576.0 * tokens[rows] + tokens[rows] ** 2.0).sum()) for rows in dealt]

    assert max(work(24_576.0)) <= 1.1 * min(work(24_576.0))
    assert max(work(math.inf)) > 1.5 * min(work(math.inf))


@pytest.mark.parametrize(
    ("kind", "described", "tokens"),
    [
        # A token's products with the layers and the head, over 2 x layers x width of the queries.
        ("Qwen3Config", QWEN3_8B, 7_568_405_504 / (2 * 36 * 4096)),
        ("Qwen3MoeConfig", QWEN3_30B_A3B, 3_041_850_368 / (2 * 48 * 4096)),
        ("Qwen3Config", SMALL_WITH_WINDOWS, 247_857_152 / (2 * 2 * 4096)),
    ],
)
def test_the_length_at_which_attention_takes_half_of_the_time(kind, described, tokens):
    config = getattr(transformers, kind)(**described)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert find_attention_length(model) == pytest.approx(tokens, rel=0.01)


def test_a_rank_has_nothing_beside_a_row_that_is_more_than_its_share():
    assert sorted(sums([1, 9, 1, 8, 1, 1, 1, 1], balance_rows([1, 9, 1, 8, 1, 1, 1, 1], 3))) == [
        *(6, 8, 9),
    ]


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


def test_pack_names_the_row_and_the_setting():
    with pytest.raises(ConfigError, match=r"Row 1 has 11 tokens.*`actor.tokens_per_microbatch`"):
        pack_rows([3, 11], 10)
    with pytest.raises(ConfigError, match=r"`critic.tokens_per_microbatch` = 10"):
        pack_rows([11], 10, setting="critic.tokens_per_microbatch")


@pytest.mark.parametrize(
    ("prompts", "responses", "shared", "alone"),
    [
        # One rank has 80 tokens and the other 130; row by row each has 140.
        ([60, 60, 10, 10], [10, 10, 60, 60], [0, 1], [0, 1]),
        # One group for both ranks: whole it would be 170 tokens, cut it is 90.
        ([10, 10, 10, 10], [40, 40, 40, 40], [0, 1], [0, 1]),
        # Whole groups would be 56 tokens and 152; both ranks have 128.
        ([40] * 4 + [8] * 4, [4] * 4 + [36] * 4, [0, 2, 4, 6], [0, 1, 2, 3]),
    ],
)
def test_samples_that_share_a_prompt_stay_together_where_that_is_quicker(
    prompts, responses, shared, alone
):
    table = Lengths(np.array(responses))
    lengths = {"prompt_ids": np.array(prompts), "response_ids": np.array(responses)}
    table.tokens = lambda: lengths
    size = 4 if len(set(prompts[:4])) == 1 else 2
    for sharing, wanted in ((size, shared), (1, alone)):
        dealt = [
            PartitionSelection(rank, 2, "tokens", 1, math.inf, sharing).rows(table).tolist()
            for rank in (0, 1)
        ]
        assert dealt[0] == wanted
        assert sorted(dealt[0] + dealt[1]) == list(range(len(prompts)))


def test_uneven_groups_are_not_scattered():
    """Without a word of groups, rows of all of them are dealt to both ranks."""
    generator = np.random.default_rng(0)
    prompts = np.repeat(generator.integers(200, 400, 16), 8)
    responses = generator.integers(1, 100, 128)
    table = Lengths(responses)
    table.tokens = lambda: {"prompt_ids": prompts, "response_ids": responses}
    work = {}
    for sharing in (8, 1):
        work[sharing] = []
        for rank in (0, 1):
            rows = PartitionSelection(rank, 2, "tokens", 1, math.inf, sharing).rows(table)
            groups = np.unique(rows // 8)
            work[sharing].append(responses[rows].sum() + prompts[groups * 8].sum())
    assert max(work[8]) <= 1.1 * min(work[8])
    assert sum(work[8]) <= sum(work[1])
