"""Blocks of attention, merged as a ring merges them, against attention of whole samples; and the
flash kernels, which need a GPU, by what they are asked."""

import itertools

import pytest
import torch
from flash_kernels import aten_backward, aten_forward
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.errors import ConfigError
from hybridrl.parallel import block_attention
from hybridrl.parallel import padded_attention as rectangles
from hybridrl.parallel.block_attention import (
    AttentionBlock,
    block_attention_backward,
    block_attention_forward,
    merge_correction,
)
from hybridrl.parallel.sequence_parallel import check_ring_window
from hybridrl.parallel.ulysses import check_ulysses_heads
from hybridrl.parallel.zigzag import split_over_ring

CPU = torch.device("cpu")
SCALE = 0.4
LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=7)
HEADS = st.sampled_from([(4, 4), (4, 2), (2, 1)])


def make(lengths, heads, key_value_heads, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(lengths), n, 6) for n in (heads, key_value_heads, key_value_heads, heads)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def plain_attention(q, k, v, lengths):
    """Causal attention of each sample, with all scores at once."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    parts = []
    for q_, k_, v_ in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q_, k_) * SCALE
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        parts.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v_)
        )
    return torch.cat(parts)


def by_blocks(q, k, v, grad, lengths, ring):
    """Output and gradients, each from the blocks of all pairs of ring ranks."""
    rows = split_over_ring(torch.tensor([0, *itertools.accumulate(lengths)]), ring)
    found = [torch.zeros_like(x) for x in (q, q, k, v)]
    for rank, row in enumerate(rows):
        mine = row.places
        blocks = [
            AttentionBlock.between(row, source, rank - j, CPU) for j, source in enumerate(rows)
        ]
        out = torch.zeros(len(mine), *q.shape[1:])
        lse = torch.full((len(mine), q.shape[1]), -torch.inf)
        picked = []
        for j in sorted(range(ring), key=lambda j, rank=rank: (j != rank, j)):
            if (block := blocks[j]) is None:
                continue
            queries = torch.arange(len(mine)) if block.queries is None else block.queries
            keys = rows[j].places if block.keys is None else rows[j].places[block.keys]
            picked.append((block, queries, keys))
            part, part_lse = block_attention_forward(
                q[mine[queries]], k[keys], v[keys], block, SCALE
            )
            if j == rank:
                out[queries], lse[queries] = part, part_lse
            else:
                changes = merge_correction(out[queries], lse[queries], part, part_lse)
                out[queries] += changes[0]
                lse[queries] += changes[1]
        found[0][mine] = out
        for block, queries, keys in picked:
            places = mine[queries]
            parts = block_attention_backward(
                *(grad[places], q[places], k[keys], v[keys]),
                *(out[queries], lse[queries], block, SCALE),
            )
            found[1].index_add_(0, places, parts[0])
            found[2].index_add_(0, keys, parts[1])
            found[3].index_add_(0, keys, parts[2])
    return found


def assert_blocks_are_the_whole(lengths, heads, ring):
    q, k, v, grad = make(lengths, *heads)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = plain_attention(*inputs, lengths)
    gradients = torch.autograd.grad(expected, inputs, grad)
    found = by_blocks(q, k, v, grad, lengths, ring)
    for part, whole in zip(found, (expected, *gradients), strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-5)


@given(LENGTHS, HEADS, st.integers(1, 4))
def test_blocks_of_a_ring_together_are_causal_attention(lengths, heads, ring):
    assert_blocks_are_the_whole(lengths, heads, ring)


@pytest.mark.parametrize("elements", [1, 300, 2000])
def test_slices_of_any_size_give_the_same(elements, monkeypatch):
    monkeypatch.setattr(rectangles, "SLICE_ELEMENTS", elements)
    assert_blocks_are_the_whole([17, 3, 30, 29, 0, 1, 28], (4, 2), 3)


def test_many_short_samples_are_few_rectangles_of_little_padding():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 64, (500,), generator=generator)
    rows = split_over_ring(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), 4)
    for j in range(4):
        block = AttentionBlock.between(rows[1], rows[j], 1 - j, CPU)
        assert len(block.rectangles) <= 12
        padded = sum(r.keys.rows * (r.queries.longest + r.keys.longest) for r in block.rectangles)
        assert padded <= 1.25 * int((block.query_lengths + block.key_lengths).sum())


def test_only_visible_blocks_are_computed():
    """At every step of a ring each rank has the same number of pairs to compute, and together they
    are those that causal attention has, but for the chunks on the diagonal."""
    chunk = 5
    rows = split_over_ring(torch.tensor([0, 8 * chunk]), 4)
    for rank, j in itertools.product(range(4), range(4)):
        block = AttentionBlock.between(rows[rank], rows[j], rank - j, CPU)
        pairs = int(block.query_lengths * block.key_lengths)
        assert block.causal == (rank == j)
        assert pairs == (4 if rank == j else 2) * chunk**2
    # A sample of one token is all on the first rank of the ring.
    rows = split_over_ring(torch.tensor([0, 1]), 2)
    found = [AttentionBlock.between(rows[r], rows[j], r - j, CPU) for r in (0, 1) for j in (0, 1)]
    assert [block is None for block in found] == [False, True, True, True]


def test_the_flash_kernels_are_asked_for_the_same(monkeypatch):
    monkeypatch.setattr(block_attention, "fits_flash", lambda q: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", aten_backward)
    assert_blocks_are_the_whole([17, 3, 30, 29, 0, 1, 28], (4, 2), 3)


def test_the_installed_flash_kernels_take_what_they_are_given():
    """By torch's own shape functions; without a GPU nothing is computed."""
    rows = split_over_ring(torch.tensor([0, 9, 20]), 2)
    block = AttentionBlock.between(rows[0], rows[1], -1, torch.device("meta"))
    queries, keys = int(block.query_lengths.sum()), int(block.key_lengths.sum())
    q = torch.empty(queries, 4, 16, dtype=torch.bfloat16, device="meta")
    k = torch.empty(keys, 2, 16, dtype=torch.bfloat16, device="meta")
    out, lse = block_attention_forward(q, k, k, block, SCALE)
    assert (out.shape, lse.shape) == (q.shape, (queries, 4))
    found = block_attention_backward(q, q, k, k, q, lse, block, SCALE)
    assert [x.shape for x in found] == [q.shape, k.shape, k.shape]
    assert {x.dtype for x in (out, lse, *found)} == {torch.float32}


@pytest.mark.parametrize("heads", [(8, 8, 4), (8, 2, 2), (8, 2, 4), (8, 1, 8), (6, 3, 3)])
def test_heads_that_can_be_divided(heads):
    check_ulysses_heads(*heads)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((6, 2, 4), r"`actor\.parallel\.ulysses` = 4 does not divide the model's 6 attention"),
        ((12, 4, 6), r"= 6 neither divides the model's 4 key-value heads"),
    ],
)
def test_heads_that_cannot_be_divided_are_a_sentence(heads, message):
    with pytest.raises(ConfigError, match=message):
        check_ulysses_heads(*heads)


def test_windows_in_a_ring_are_a_sentence():
    check_ring_window(None)
    with pytest.raises(ConfigError, match=r"windows of 7 tokens.*`actor\.parallel\.ulysses`"):
        check_ring_window(7)
