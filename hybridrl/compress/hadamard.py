"""The Hadamard transform of 32 values, which spreads an outlier over all of them."""

from __future__ import annotations

import torch

HADAMARD_WIDTH = 32
"""Values that are mixed: SDP4Bit's choice (arXiv 2410.15526, section 3.2), a warp of a GPU."""
TAIL_FACTOR = 1 / 8
"""What the values after the last 32 are multiplied by, which stay unmixed: about what mixing does
to values that are alike (1 / sqrt(32)), as a power of two, which rounds nothing. Else they would be
the largest of their group, and its scale too coarse for the others."""


def apply_hadamard(values: torch.Tensor) -> torch.Tensor:
    """Return H x / 32 of each 32 consecutive values x. H is symmetric, of ones and minus ones, and
    H H = 32, so `invert_hadamard` undoes it.

    Args:
        values: Float32, flat. The last `numel % 32` of them are not mixed but divided by 8.

    Returns:
        A new tensor. No result is larger than the largest of its 32 values.
    """
    # An exact product, and first, lest the sum of 32 large numbers be infinite.
    return _multiply_hadamard(values, 1 / HADAMARD_WIDTH, TAIL_FACTOR)


def invert_hadamard(values: torch.Tensor) -> torch.Tensor:
    """Return H x of each 32 consecutive values x; exact where they are integers of at most 19 bits.

    Args:
        values: Float32, flat. The last `numel % 32` of them are multiplied by 8.
    """
    return _multiply_hadamard(values, 1.0, 1 / TAIL_FACTOR)


def _multiply_hadamard(values: torch.Tensor, factor: float, rest: float) -> torch.Tensor:
    """Return H x times a power of two. Values are added in pairs at distances 1, 2, 4, 8 and 16 on
    every device, so that all get the same bits."""
    rows = len(values) // HADAMARD_WIDTH
    transformed = values * rest
    shape = (rows, HADAMARD_WIDTH)
    given, whole = (one[: rows * HADAMARD_WIDTH].view(shape) for one in (values, transformed))
    # One column for each 32 values: what is added then lies far apart, in long stretches.
    terms, sums = (given * factor).t().contiguous(), whole.new_empty(HADAMARD_WIDTH, rows)
    distance = 1
    while distance < HADAMARD_WIDTH:
        halves = (HADAMARD_WIDTH // (2 * distance), 2, distance, rows)
        (first, second), pairs = terms.view(halves).unbind(1), sums.view(halves)
        torch.add(first, second, out=pairs[:, 0])
        torch.sub(first, second, out=pairs[:, 1])
        terms, sums = sums, terms
        distance *= 2
    whole.copy_(terms.t())
    return transformed
