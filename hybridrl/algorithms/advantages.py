"""Advantages per token, from rewards along a response.

Tokens are padded ``[rows, time]``, or packed ``[tokens]`` with the `TokenSegments` that tell the
rows. Time runs along the tokens under the mask only: a hole (tool output, a user's turn) is
skipped, whatever its length, and receives 0. What is computed is as large as there are tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.segments import (
    TokenSegments,
    apply_mask,
    as_float,
    resolve_segments,
    whiten,
)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    *,
    segments: TokenSegments | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimation: advantages and returns.

    From the last token back, next being the next token under the mask and the value after the
    last one 0: delta = r + gamma V(next) - V; A = delta + gamma lam A(next); return = A + V.
    Advantages are not whitened, and rows do not depend on each other. Schulman 2015,
    arXiv:1506.02438, equation 16.
    """
    rewards, values = as_float(rewards, values)
    samples = resolve_segments(mask, segments)
    held = samples.mask
    row, known = samples.row[held], values[held]
    deltas = rewards[held] + gamma * _later(known, row, 1) - known
    advantages = discounted_cumsum(deltas, row, gamma * lam)
    return place_on_mask(held, advantages), place_on_mask(held, advantages + known)


@torch.no_grad()
def reinforce_plus_plus(
    rewards: Tensor, mask: Tensor, gamma: float = 1.0, *, segments: TokenSegments | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the advantages and returns of REINFORCE++.

    Returns are the discounted rewards to go; advantages are the returns whitened over the
    tokens of the batch, so every row depends on all. Hu 2025, arXiv:2501.03262.
    """
    samples = resolve_segments(mask, segments)
    returns = returns_to_go(rewards, mask, gamma, segments=samples)
    return whiten(returns, samples.mask), returns


@torch.no_grad()
def remax(
    rewards: Tensor, greedy_scores: Tensor, mask: Tensor, *, segments: TokenSegments | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the advantages and returns of ReMax.

    Returns are the undiscounted rewards to go; the advantage is the return minus the score of
    the greedy answer to the same prompt, greedy_scores ``[rows]``. Rows do not depend on each
    other. Li 2023, arXiv:2310.10505.
    """
    samples = resolve_segments(mask, segments)
    returns = returns_to_go(rewards, mask, segments=samples)
    return returns - samples.spread(greedy_scores), returns


@torch.no_grad()
def broadcast_to_tokens(row_values: Tensor, mask: Tensor) -> Tensor:
    """Put a per-row value ``[rows]`` on each token of its row, 0 off the mask; detached."""
    return TokenSegments.from_mask(mask).spread(row_values)


@torch.no_grad()
def returns_to_go(
    rewards: Tensor, mask: Tensor, gamma: float = 1.0, *, segments: TokenSegments | None = None
) -> Tensor:
    """Compute the discounted rewards from each token on, that token's included. Rows do not depend
    on each other."""
    samples = resolve_segments(mask, segments)
    (rewards,) = as_float(rewards)
    held = samples.mask
    return place_on_mask(held, discounted_cumsum(rewards[held], samples.row[held], gamma))


def place_on_mask(held: Tensor, kept: Tensor) -> Tensor:
    """Place values of the tokens under the mask in the full shape, 0 elsewhere."""
    found = torch.zeros(held.shape, dtype=kept.dtype, device=kept.device)
    found[held] = kept
    return found


def _later(x: Tensor, row: Tensor, steps: int) -> Tensor:
    """Return the value `steps` later in the same row, 0 where the row has ended.

    x, row: ``[tokens]``, those under the mask, one row after the other, and the row of each.
    """
    found = torch.zeros_like(x)
    found[:-steps] = apply_mask(x[steps:], row[steps:] == row[:-steps])
    return found


def discounted_cumsum(x: Tensor, row: Tensor, discount: float) -> Tensor:
    """Compute y_t = x_t + discount y_{t+1} along each row; x and row as for `_later`.

    Sums over windows that double: after k rounds y_t holds the next 2^k terms. This takes
    log2(longest row) tensor operations where a loop over time takes as many as there are tokens.
    """
    longest = int(row.bincount().max()) if len(row) else 0
    steps = 1
    while steps < longest and discount != 0.0:
        x = x + discount * _later(x, row, steps)
        discount *= discount
        steps *= 2
    return x
