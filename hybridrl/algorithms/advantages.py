"""Advantages per token, from rewards along an answer.

All tensors are ``[rows, time]``. Time runs along the tokens under the mask only: a hole (tool
output, a user's turn) is skipped, whatever its length, and receives 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.masking import as_bool, as_float, on_mask
from hybridrl.algorithms.segments import Segments
from hybridrl.algorithms.statistics import whiten


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: advantages and returns.

    From the last token back, next being the next token under the mask and the value after the
    last one 0: delta = r + gamma V(next) - V; A = delta + gamma lam A(next); return = A + V.
    Advantages are not whitened. Schulman 2015, arXiv:1506.02438, equation 16.
    """
    rewards, values = as_float(rewards, values)
    order = _closing_holes(mask)
    rewards = on_mask(rewards, mask).gather(-1, order)
    values = on_mask(values, mask).gather(-1, order)
    deltas = rewards + gamma * _later(values, 1) - values
    advantages = _discounted_to_go(deltas, gamma * lam)
    return _reopen(advantages, order, mask), _reopen(advantages + values, order, mask)


@torch.no_grad()
def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """REINFORCE++: advantages and returns.

    Returns are the discounted rewards to go; advantages are the returns whitened over the
    tokens of the batch. Hu 2025, arXiv:2501.03262.
    """
    returns = _returns(rewards, mask, gamma)
    return whiten(returns, mask), returns


@torch.no_grad()
def remax(rewards: Tensor, greedy_scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """ReMax: advantages and returns.

    Returns are the undiscounted rewards to go; the advantage is the return minus the score of
    the greedy answer to the same prompt, greedy_scores ``[rows]``. Li 2023, arXiv:2310.10505.
    """
    returns = _returns(rewards, mask, 1.0)
    return on_mask(returns - greedy_scores.unsqueeze(-1), mask), returns


@torch.no_grad()
def spread(row_values: Tensor, mask: Tensor) -> Tensor:
    """A per-row value ``[rows]`` on each token of its row; 0 off the mask. Detached."""
    return Segments.from_mask(mask).spread(row_values)


def _returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    (rewards,) = as_float(rewards)
    order = _closing_holes(mask)
    rewards = on_mask(rewards, mask).gather(-1, order)
    return _reopen(_discounted_to_go(rewards, gamma), order, mask)


def _closing_holes(mask: Tensor) -> Tensor:
    """The order of time in which the tokens under the mask come first, themselves in order."""
    return torch.argsort(as_bool(mask).to(torch.int8), dim=-1, descending=True, stable=True)


def _reopen(x: Tensor, order: Tensor, mask: Tensor) -> Tensor:
    return on_mask(torch.zeros_like(x).scatter(-1, order, x), mask)


def _later(x: Tensor, steps: int) -> Tensor:
    """x shifted so that each place holds what comes `steps` later, and 0 at the end."""
    return torch.nn.functional.pad(x[..., steps:], (0, steps))


def _discounted_to_go(x: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount y_{t+1}.

    Sums over windows that double: after k rounds y_t holds the next 2^k terms. This takes
    log2(time) tensor operations where a loop over time takes as many as there are tokens.
    """
    steps = 1
    while steps < x.shape[-1] and discount != 0.0:
        x = x + discount * _later(x, steps)
        discount *= discount
        steps *= 2
    return x
