"""The gap between the program that sampled the tokens and the one that trains on them.

Two engines compute slightly (or, after asynchronous steps, clearly) different probabilities for
the same token, which makes on-policy data off-policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.kl import kl
from hybridrl.algorithms.masked_statistics import masked_mean
from hybridrl.algorithms.masking import as_bool, as_float, on_mask, require_known
from hybridrl.algorithms.segments import Segments, samples_of
from hybridrl.errors import ConfigError


@torch.no_grad()
def importance_weights(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    level: str = "token",
    mode: str = "truncate",
    low: float | None = None,
    high: float | None = 2.0,
    *,
    segments: Segments | None = None,
) -> Tensor:
    """Weights that turn tokens of the rollout engine into tokens of the trainer; detached.

    log_probs, rollout_log_probs, mask: ``[rows, time]``, or packed with ``segments``. With
    d = clamp(log_probs - rollout_log_probs, -20, 20), the weight w is exp(d) at ``level``
    ``token``, and exp of the summed d of the answer (clamped to +-20 again) at ``sequence``.

    * ``truncate``: min(w, high), truncated importance sampling (Yao 2025, "Your efficient RL
      framework secretly brings you off-policy RL training"); ``low`` is not used.
    * ``mask``: w inside [low, high] and 0 outside (IcePop, arXiv:2510.18855). No bound, no test.
    """
    require_known("level", level, ("token", "sequence"))
    require_known("mode", mode, ("truncate", "mask"))
    if low is not None and high is not None and low > high:
        raise ConfigError(f"`low` is {low} and `high` is {high}; expected low <= high.")
    mask = as_bool(mask)
    difference = _difference(log_probs, rollout_log_probs, mask).clamp(-20.0, 20.0)
    if level == "sequence":
        samples = samples_of(mask, segments)
        difference = samples.spread(samples.sum(difference).clamp(-20.0, 20.0))
    weights = difference.exp()
    if mode == "truncate":
        weights = weights if high is None else weights.clamp(max=high)
    else:
        inside = torch.ones_like(mask)
        if low is not None:
            inside = inside & (weights >= low)
        if high is not None:
            inside = inside & (weights <= high)
        weights = on_mask(weights, inside)
    return on_mask(weights, mask)


@torch.no_grad()
def mismatch(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    segments: Segments | None = None,
) -> dict[str, Tensor]:
    """How far the trainer's log-probabilities are from the rollout engine's; scalars.

    * ``kl``: k1 estimate of KL(rollout || trainer), the mean of rollout - trainer; nats.
    * ``k3``: the same divergence by k3, which is never negative.
    * ``ppl_ratio``: the trainer's perplexity of an answer over the rollout engine's, averaged
      over the answers.
    * ``max_abs``: the largest absolute difference of a log-probability.
    * ``ess``: effective sample size of the tokens under importance weights w, as a fraction:
      (sum w)^2 / (tokens * sum w^2).

    Without any token there is no gap: the ratios are 1 and the differences 0.
    """
    mask = as_bool(mask)
    samples = samples_of(mask, segments)
    mask = samples.mask
    difference = _difference(log_probs, rollout_log_probs, mask)
    weights = on_mask(difference.clamp(-20.0, 20.0).exp(), mask)
    tokens = mask.sum()
    answers = samples.lengths > 0
    squares = weights.square().sum()
    one = torch.ones_like(squares)
    return {
        "kl": masked_mean(-difference, mask),
        "k3": masked_mean(kl(rollout_log_probs, log_probs, "k3", mask=mask), mask),
        "ppl_ratio": torch.where(
            answers.any(), masked_mean(samples.mean(-difference).exp(), answers), one
        ),
        "max_abs": difference.abs().max() if difference.numel() else torch.zeros_like(one),
        "ess": torch.where(tokens > 0, weights.sum().square() / (tokens * squares), one),
    }


def _difference(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    log_probs, rollout_log_probs = as_float(log_probs, rollout_log_probs)
    return on_mask(log_probs - rollout_log_probs, mask)
