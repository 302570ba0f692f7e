"""Masked mean, variance and whitening against the plain formulas on the tokens kept."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms import TokenSegments, divide_by_std, masked_mean, masked_var, whiten
from hybridrl.errors import ConfigError

POISON = (math.nan, math.inf, -math.inf, 1e30)


@st.composite
def masked_tokens(draw, dtype=torch.float64):
    """x [rows, time] with poison off the mask, and a mask with holes and empty rows."""
    rows, time = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    bits = draw(st.lists(st.booleans(), min_size=rows * time, max_size=rows * time))
    mask = torch.tensor(bits).view(rows, time)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    x = torch.randn(rows, time, generator=generator, dtype=dtype) * 3 + 1
    return torch.where(mask, x, draw(st.sampled_from(POISON))), mask


@given(masked_tokens())
def test_statistics_equal_those_of_the_kept_tokens(case):
    x, mask = case
    kept = x[mask]
    if len(kept) == 0:
        assert masked_mean(x, mask) == 0
    else:
        torch.testing.assert_close(masked_mean(x, mask), kept.mean())
    if len(kept) < 2:
        assert masked_var(x, mask) == 0
        assert (whiten(x, mask) == 0).all()
        return
    torch.testing.assert_close(masked_var(x, mask), kept.var())
    expected = (kept - kept.mean()) / (kept.var() + 1e-8).sqrt()
    torch.testing.assert_close(whiten(x, mask)[mask], expected)
    assert (whiten(x, mask)[~mask] == 0).all()


@given(masked_tokens())
def test_no_gradient_leaks_from_off_the_mask(case):
    x, mask = case
    x = x.clone().requires_grad_()
    (masked_mean(x, mask) + masked_var(x, mask) + whiten(x, mask).square().sum()).backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad[~mask] == 0).all()


def test_a_constant_is_whitened_to_zero_in_float32():
    for value, size in ((5.3, 7), (99.99, 125)):
        x = torch.full((1, size), value)
        assert whiten(x, torch.ones(1, size)).abs().max() < 1e-6


def test_arguments_keep_their_values_and_results_are_float32_at_least():
    x = torch.tensor([[1.0, math.nan]], dtype=torch.bfloat16)
    mask = torch.tensor([[1, 0]])
    before = x.clone()
    assert whiten(x, mask).dtype == torch.float32
    assert masked_mean(x.double(), mask).dtype == torch.float64
    assert torch.equal(x.nan_to_num(), before.nan_to_num())
    assert masked_mean(torch.tensor([1, 2]), torch.tensor([1, 1])) == 1.5


@given(masked_tokens())
def test_segments_padded_and_packed_say_the_same(case):
    x, mask = case
    rows, time = mask.shape
    padded = TokenSegments.from_mask(mask)
    cu_seqlens = torch.arange(rows + 1) * time
    packed = TokenSegments.from_cu_seqlens(cu_seqlens, mask.flatten())
    dense = TokenSegments.from_cu_seqlens(torch.tensor([0, *mask.sum(-1).cumsum(0).tolist()]))
    kept = [row[held] for row, held in zip(x, mask, strict=True)]
    sums = torch.stack([row.sum() for row in kept])
    means = torch.stack([row.mean() if len(row) else row.sum() for row in kept])
    lasts = [row.tolist()[-1] if len(row) else 0.0 for row in kept]
    for segments, tokens in ((padded, x), (packed, x.flatten()), (dense, x[mask])):
        assert segments.rows == rows
        assert torch.equal(segments.lengths, mask.sum(-1))
        torch.testing.assert_close(segments.sum(tokens), sums)
        torch.testing.assert_close(segments.mean(tokens), means)
        assert segments.last(tokens).tolist() == lasts
        spread = segments.spread(means)
        assert spread.shape == tokens.shape
        torch.testing.assert_close(
            spread[segments.mask], means.repeat_interleave(mask.sum(-1)), rtol=0, atol=0
        )
        assert (spread[~segments.mask] == 0).all()


def test_segments_of_nothing():
    for segments in (
        TokenSegments.from_mask(torch.zeros(0, 3)),
        TokenSegments.from_mask(torch.zeros(2, 0)),
        TokenSegments.from_cu_seqlens(torch.tensor([0])),
    ):
        empty = torch.zeros(segments.mask.shape)
        assert segments.spread(segments.mean(empty)).shape == empty.shape


def test_segments_refuse_shapes_that_do_not_fit():
    with pytest.raises(ConfigError, match="from_cu_seqlens"):
        TokenSegments.from_mask(torch.ones(3))
    with pytest.raises(ConfigError, match="2 tokens"):
        TokenSegments.from_cu_seqlens(torch.tensor([0, 2]), torch.ones(3))
    with pytest.raises(ConfigError, match="one layout"):
        TokenSegments.from_cu_seqlens(torch.tensor([0, 2])).within(torch.ones(1, 2))


@given(masked_tokens())
def test_dividing_by_the_standard_deviation_keeps_the_mean(case):
    x, mask = case
    kept = x[mask]
    found = divide_by_std(x, mask)
    assert (found[~mask] == 0).all()
    if len(kept) > 1:
        torch.testing.assert_close(found[mask], kept / max(kept.std(), kept.mean().abs() / 10))
        torch.testing.assert_close(divide_by_std(x * 1e4, mask)[mask], found[mask])


def test_what_is_all_alike_is_not_divided_by_its_rounding():
    for value in (5.3, -99.99, 0.0):
        found = divide_by_std(torch.full((1, 125), value), torch.ones(1, 125))
        sign = (value > 0) - (value < 0)
        torch.testing.assert_close(found, torch.full((1, 125), 10.0 * sign))
