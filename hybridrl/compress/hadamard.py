"""The Hadamard transform of 32 values, which spreads an outlier over all of them."""

from __future__ import annotations

import torch

WIDTH = 32
"""Values that are mixed: SDP4Bit's choice (arXiv 2410.15526, section 3.2), a warp of a GPU."""


def mix(values: torch.Tensor) -> torch.Tensor:
    """H x / 32 of each 32 consecutive values x. H is symmetric, of ones and minus ones, and
    H H = 32, so `unmix` undoes it.

    Args:
        values: Float32, flat. The last `numel % 32` of them stay as they are.

    Returns:
        A new tensor. No result is larger than the largest of its 32 values.
    """
    # An exact product, and first, lest the sum of 32 large numbers be infinite.
    return _times_h(values, 1 / WIDTH)


def unmix(values: torch.Tensor) -> torch.Tensor:
    """H x of each 32 consecutive values x: exact where they are integers of at most 19 bits.

    Args:
        values: Float32, flat. The last `numel % 32` of them stay as they are.
    """
    return _times_h(values, 1.0)


def _times_h(values: torch.Tensor, factor: float) -> torch.Tensor:
    """H x times a power of two. Values are added in pairs at distances 1, 2, 4, 8 and 16 on every
    device, so that all get the same bits."""
    rows = len(values) // WIDTH
    transformed = values.clone()
    whole = transformed[: rows * WIDTH].view(rows, WIDTH)
    # One column for each 32 values: what is added then lies far apart, in long stretches.
    terms, sums = (whole * factor).t().contiguous(), whole.new_empty(WIDTH, rows)
    distance = 1
    while distance < WIDTH:
        shape = (WIDTH // (2 * distance), 2, distance, rows)
        (first, second), pairs = terms.view(shape).unbind(1), sums.view(shape)
        torch.add(first, second, out=pairs[:, 0])
        torch.sub(first, second, out=pairs[:, 1])
        terms, sums = sums, terms
        distance *= 2
    whole.copy_(terms.t())
    return transformed
