"""Credit for parts of an answer, against loops over tokens written by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms import (
    TokenSegments,
    group_relative,
    min_form_rewards,
    part_advantages,
    part_numbers,
    place_part_rewards,
)


def draw(seed):
    """Rows of any length, holes in them, with steps at any places."""
    random = torch.Generator().manual_seed(seed)
    rows = int(torch.randint(0, 5, (), generator=random))
    lengths = torch.randint(0, 7, (rows,), generator=random)
    mask = torch.rand(int(lengths.sum()), generator=random) < 0.7
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    steps = [
        sorted(torch.randint(1, int(n) + 1, (2,), generator=random).tolist()) if n else []
        for n in lengths
    ]
    row = torch.tensor([r for r, ends in enumerate(steps) for _ in ends], dtype=torch.long)
    ends = torch.tensor([end for found in steps for end in found], dtype=torch.long)
    rewards = torch.randn(len(ends), generator=random)
    groups = torch.randint(0, 2, (rows,), generator=random)
    return (
        lengths,
        mask,
        TokenSegments.from_cu_seqlens(cu_seqlens, mask),
        ends,
        row,
        rewards,
        groups,
    )


def places(lengths, mask, ends, row):
    """The token of each step's end, by hand; None where the row has none."""
    starts = [sum(lengths[:r].tolist()) for r in range(len(lengths))]
    found = []
    for end, r in zip(ends.tolist(), row.tolist(), strict=True):
        begin, stop = starts[r], starts[r] + int(lengths[r])
        before = [t for t in range(begin, begin + end) if mask[t]]
        after = [t for t in range(begin, stop) if mask[t]]
        found.append(before[-1] if before else after[0] if after else None)
    return found


@given(st.integers(0, 10_000))
def test_parts_end_where_their_rewards_lie(seed):
    lengths, mask, segments, ends, row, rewards, _ = draw(seed)
    at = places(lengths, mask, ends, row)
    expected = torch.zeros(len(mask))
    for place, reward in zip(at, rewards.tolist(), strict=True):
        if place is not None:
            expected[place] += reward
    torch.testing.assert_close(place_part_rewards(ends, rewards, row, segments), expected)
    numbers = [
        len({p for p in at if p is not None and p < t and segments.row[p] == segments.row[t]})
        for t in range(len(mask))
    ]
    assert part_numbers(ends, row, segments).tolist() == numbers


@given(st.integers(0, 10_000), st.sampled_from([1.0, 0.5]))
def test_a_part_is_compared_with_those_in_its_place(seed, gamma):
    lengths, mask, segments, ends, row, rewards, groups = draw(seed)
    tokens = place_part_rewards(ends, rewards, row, segments)
    numbers = part_numbers(ends, row, segments)
    found = part_advantages(tokens, numbers, groups, segments, "none", gamma)
    returns, first = {}, {}
    for r in range(len(lengths)):
        mine = [t for t in range(len(mask)) if segments.row[t] == r and mask[t]]
        for place, t in enumerate(mine):
            to_go = sum(gamma**k * float(tokens[u]) for k, u in enumerate(mine[place:]))
            if (r, int(numbers[t])) not in first:
                first[r, int(numbers[t])] = t
                returns[r, int(numbers[t])] = to_go
    for t in range(len(mask)):
        expected = 0.0
        if mask[t]:
            r, n = int(segments.row[t]), int(numbers[t])
            peers = [v for (q, m), v in returns.items() if m == n and groups[q] == groups[r]]
            if len(peers) > 1:
                expected = returns[r, n] - sum(peers) / len(peers)
        assert float(found[t]) == pytest.approx(expected, abs=1e-5)


def test_one_part_a_row_is_a_whole_sample():
    cu_seqlens, scores = torch.tensor([0, 2, 5, 6, 9]), torch.tensor([1.0, 0.0, 3.0, 0.5])
    segments = TokenSegments.from_cu_seqlens(cu_seqlens)
    rewards = torch.zeros(9)
    rewards[cu_seqlens[1:] - 1] = scores
    groups = torch.tensor([4, 4, 2, 2])
    none = torch.empty(0, dtype=torch.long)
    for scale in ("std", "none", "batch"):
        found = part_advantages(
            rewards, part_numbers(none, none, segments), groups, segments, scale
        )
        torch.testing.assert_close(found, segments.spread(group_relative(scores, groups, scale)))


def test_the_least_of_a_row_is_what_its_steps_add_up_to():
    rewards, row = torch.tensor([0.9, 0.1, 0.8, -3.0, 5.0, 0.5]), torch.tensor([0, 0, 0, 1, 1, 3])
    credit = min_form_rewards(rewards, row)
    sums = torch.zeros(4).index_add(0, row, credit)
    torch.testing.assert_close(sums, torch.tensor([0.1, -3.0, 0.0, 0.5]), atol=2e-3, rtol=0)
    weights = [math.exp(-x / 0.1) for x in (0.9, 0.1, 0.8)]
    assert credit[0] == pytest.approx(0.9 * weights[0] / sum(weights), rel=1e-4)
    assert len(min_form_rewards(torch.empty(0), torch.empty(0, dtype=torch.long))) == 0
