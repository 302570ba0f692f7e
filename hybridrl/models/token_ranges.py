"""Ranges of neighbouring tokens in a packed row."""

from __future__ import annotations

import torch


def concatenate_ranges(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the concatenation of the ranges `[start, start + length)` of all pairs."""
    shift = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)
