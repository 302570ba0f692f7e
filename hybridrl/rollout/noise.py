"""Random numbers that depend on a sample's seed and the place in it alone: however samples are
spread over devices and batches, each draws the same."""

from __future__ import annotations

import torch
from torch import Tensor

_SEED, _PLACE, _TOKEN = 0x632BE59BD9B4E019, 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D
_FIRST, _SECOND = 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
_START = 0x6A09E667F3BCC909  # without it all zeros would be mixed to zero
_BITS = 63
_BELOW_ONE = 1 - 2**-24  # the largest float32 below 1


def gumbel(seeds: Tensor, places: Tensor, width: int) -> Tensor:
    """Standard Gumbel noise. The largest of log-probabilities to which it is added is a draw from
    them (Gumbel 1954, the "Gumbel-max trick").

    Args:
        seeds: Of each sample, ``[samples]`` int64.
        places: How many tokens each has already, ``[samples]`` int64.
        width: Size of the vocabulary.

    Returns:
        ``[samples, width]`` float32.
    """
    tokens = torch.arange(width, device=seeds.device)
    rows = _mix(_mix(seeds * _SEED + _START) + places * _PLACE)
    mixed = _mix(rows[:, None] + tokens * _TOKEN)
    return -torch.log(-torch.log1p(-uniform(mixed)))


def uniform(bits: Tensor) -> Tensor:
    """Uniform float32 numbers of random int64 bits, strictly between 0 and 1: from 2**-64 to
    1 - 2**-24, so that the logarithms of a number and of 1 minus it are finite. Float32 is fine
    near 0 and coarse near 1, so it is small numbers that should decide what is rare."""
    return ((_shifted(bits, 64 - _BITS).float() + 0.5) / 2**_BITS).clamp_(max=_BELOW_ONE)


def _mix(x: Tensor) -> Tensor:
    """Scrambles 64 bits: multiplications and shifts as in SplitMix64 (Steele et al. 2014)."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifted right as an unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
