"""Zigzag: every token once, in order, and the same work on every rank of the ring."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.models.token_ranges import concatenate_ranges
from hybridrl.parallel.zigzag import (
    compute_rank_positions,
    split_bounds,
    split_over_ring,
)

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=9)


def bounds_of(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


def realistic(seed, samples=64):
    """Bounds of samples as reinforcement learning has them: most short, a few very long."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randn(samples, generator=generator).mul(0.8).add(6.2).exp().clamp(20, 8000)
    return bounds_of(lengths.long().tolist())


@given(LENGTHS, st.integers(1, 5), st.integers(1, 4))
def test_the_ranks_hold_each_place_once(lengths, ring, ulysses):
    cu_seqlens = bounds_of(lengths)
    rows = split_over_ring(cu_seqlens, ring)
    places = compute_rank_positions(rows, ulysses)
    assert len(places) == ring * ulysses
    assert sorted(torch.cat(places).tolist()) == list(range(sum(lengths)))
    for rank, row in enumerate(rows):
        parts = places[rank * ulysses : (rank + 1) * ulysses]
        assert torch.equal(torch.cat(parts), row.places), "the parts of a ring rank are its row"
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert bool((row.places.diff() > 0).all())


@given(LENGTHS, st.integers(1, 5))
def test_a_ring_rank_holds_an_early_and_a_late_chunk_of_each_sample(lengths, ring):
    cu_seqlens = bounds_of(lengths)
    for rank, row in enumerate(split_over_ring(cu_seqlens, ring)):
        expected = []
        for sample, (start, length) in enumerate(zip(cu_seqlens.tolist(), lengths, strict=False)):
            chunks = []
            for k in (rank, 2 * ring - 1 - rank):
                chunks.append(range(length * k // (2 * ring), length * (k + 1) // (2 * ring)))
            assert row.early[sample] == len(chunks[0]) and row.late[sample] == len(chunks[1])
            assert row.lengths[sample] == len(chunks[0]) + len(chunks[1])
            expected += [start + position for chunk in chunks for position in chunk]
        assert row.places.tolist() == expected


def visible_pairs(cu_seqlens, places):
    """The work of causal attention for the queries at `places`: pairs of a query and a key that it
    sees, itself included."""
    samples = torch.bucketize(places, cu_seqlens, right=True) - 1
    return int((places - cu_seqlens[samples] + 1).sum())


@pytest.mark.parametrize("seed", range(4))
def test_causal_attention_is_even_work_where_consecutive_parts_are_not(seed):
    cu_seqlens = realistic(seed)
    lengths = cu_seqlens.diff()
    whole = visible_pairs(cu_seqlens, torch.arange(int(cu_seqlens[-1])))
    assert whole == int((lengths * (lengths + 1) // 2).sum())

    zigzag = [visible_pairs(cu_seqlens, row.places) for row in split_over_ring(cu_seqlens, 4)]
    assert sum(zigzag) == whole
    assert max(zigzag) <= 1.05 * whole / 4

    quarters = lengths[:, None] * torch.arange(5) // 4
    consecutive = [
        visible_pairs(
            cu_seqlens, concatenate_ranges(cu_seqlens[:-1] + quarters[:, k], quarters.diff()[:, k])
        )
        for k in range(4)
    ]
    assert sum(consecutive) == whole
    assert max(consecutive) * 4 / whole == pytest.approx(1.75, abs=0.03)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_even_too(seed):
    cu_seqlens = realistic(seed)
    counts = [len(places) for places in compute_rank_positions(split_over_ring(cu_seqlens, 4), 2)]
    assert max(counts) <= 1.02 * sum(counts) / len(counts)


@given(st.integers(0, 100), st.integers(1, 9))
def test_even_bounds(tokens, parts):
    bounds = split_bounds(tokens, parts)
    sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, tokens, parts)
    assert max(sizes) - min(sizes) <= 1


def test_ranges():
    assert concatenate_ranges(torch.tensor([5, 0, 9]), torch.tensor([2, 0, 3])).tolist() == [
        5,
        6,
        9,
        10,
        11,
    ]
