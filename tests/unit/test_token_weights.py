"""Weights per token: the five ways of averaging, padded and packed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms import TokenSegments, token_weights
from hybridrl.errors import ConfigError

MODES = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-sum",
)


@st.composite
def masks(draw):
    rows, time = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    bits = draw(st.lists(st.booleans(), min_size=rows * time, max_size=rows * time))
    return torch.tensor(bits).view(rows, time)


def slow_mean(loss, mask, mode, length_norm):
    """The averages as one would write them over lists."""
    rows = [row[held] for row, held in zip(loss, mask, strict=True) if held.any()]
    if not rows:
        return torch.zeros((), dtype=loss.dtype)
    if mode == "token-mean":
        return torch.cat(rows).mean()
    if mode == "token-sum":
        return torch.cat(rows).sum()
    if mode == "seq-mean-token-mean":
        return torch.stack([row.mean() for row in rows]).mean()
    sums = torch.stack([row.sum() for row in rows]).mean()
    return sums if mode == "seq-mean-token-sum" else sums / length_norm


@pytest.mark.parametrize("mode", MODES)
@given(mask=masks(), length_norm=st.sampled_from([None, 3, 100.0]), seed=st.integers(0, 1000))
@settings(max_examples=25)
def test_weights_give_the_average_of_their_name(mode, mask, length_norm, seed):
    generator = torch.Generator().manual_seed(seed)
    loss = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    weights = token_weights(mask.double(), mode, length_norm=length_norm)
    assert weights.shape == mask.shape and weights.dtype == torch.float64
    assert (weights[~mask] == 0).all() and torch.isfinite(weights).all()
    expected = slow_mean(loss, mask, mode, length_norm or mask.shape[-1])
    torch.testing.assert_close((weights * loss).sum(), expected)


@pytest.mark.parametrize("mode", MODES)
@given(mask=masks())
@settings(max_examples=25)
def test_packed_equals_padded(mode, mask):
    rows, time = mask.shape
    padded = token_weights(mask, mode, length_norm=7)
    cu_seqlens = torch.arange(rows + 1) * time
    with_holes = token_weights(
        mask.flatten(), mode, length_norm=7, segments=TokenSegments.from_cu_seqlens(cu_seqlens)
    )
    assert torch.equal(with_holes.view(rows, time), padded)
    dense = TokenSegments.from_cu_seqlens(torch.tensor([0, *mask.sum(-1).cumsum(0).tolist()]))
    packed = token_weights(mask[mask], mode, length_norm=7, segments=dense)
    assert torch.equal(packed, padded[mask])
    assert packed.dtype == torch.float32


@pytest.mark.parametrize("mode", MODES)
def test_nothing_weighs_nothing(mode):
    for mask in (torch.zeros(3, 4), torch.zeros(0, 4), torch.zeros(2, 0)):
        weights = token_weights(mask, mode)
        assert weights.shape == mask.shape
        assert (weights == 0).all()


def test_wrong_settings_are_refused():
    mask = torch.ones(2, 3)
    with pytest.raises(ConfigError, match="Did you mean `token-mean`"):
        token_weights(mask, "token_mean")
    packed = TokenSegments.from_cu_seqlens(torch.tensor([0, 2, 3]))
    with pytest.raises(ConfigError, match="length_norm"):
        token_weights(torch.ones(3), "seq-mean-token-sum-norm", segments=packed)
    with pytest.raises(ConfigError, match="length_norm"):
        token_weights(mask, "seq-mean-token-sum-norm", length_norm=0)
    with pytest.raises(ConfigError, match="cu_seqlens"):
        token_weights(torch.ones(3), "token-mean")
    with pytest.raises(ConfigError, match="one layout"):
        token_weights(mask, "token-mean", segments=packed)
