"""The correction of the gap between the engine that sampled the tokens and the trainer.

Two engines compute slightly (or, after asynchronous steps, clearly) different probabilities for
the same token, which makes on-policy data off-policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.segments import (
    TokenSegments,
    apply_mask,
    as_bool,
    as_float,
    check_known_name,
    resolve_segments,
)
from hybridrl.algorithms.trust_region_losses import compute_binary_kl
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
    max_kl: float = 0.1,
    *,
    segments: TokenSegments | None = None,
) -> Tensor:
    """Compute weights that turn tokens of the rollout engine into tokens of the trainer; detached.

    log_probs, rollout_log_probs, mask: ``[rows, time]``, or packed with ``segments``. With
    d = clamp(log_probs - rollout_log_probs, -20, 20), the weight w is exp(d) at ``level``
    ``token``; exp of the summed d of the answer (clamped to +-20 again) at ``sequence``; and exp
    of its mean d at ``geometric``.

    * ``truncate``: min(w, high), truncated importance sampling (Yao 2025, "Your efficient RL
      framework secretly brings you off-policy RL training"); ``low`` is not used.
    * ``mask``: w inside [low, high] and 0 outside (IcePop, arXiv:2510.18855). No bound, no test.
    * ``kpop``: w where `compute_binary_kl` of the two engines' probabilities of the token is
      ``max_kl`` or less in both directions, and 0 elsewhere (KPop, Guo et al. 2026, Ant Group);
      ``level`` is ``token``, and ``low`` and ``high`` are not used.
    """
    check_known_name("level", level, ("token", "sequence", "geometric"))
    check_known_name("mode", mode, ("truncate", "mask", "kpop"))
    if mode == "kpop" and level != "token":
        raise ConfigError(f"`mode` kpop compares tokens, but `level` is {level}; expected token.")
    if low is not None and high is not None and low > high:
        raise ConfigError(f"`low` is {low} and `high` is {high}; expected low <= high.")
    mask = as_bool(mask)
    log_probs, rollout_log_probs = as_float(log_probs, rollout_log_probs)
    difference = apply_mask(log_probs - rollout_log_probs, mask).clamp(-20.0, 20.0)
    if level != "token":
        samples = resolve_segments(mask, segments)
        total = samples.sum(difference).clamp(-20.0, 20.0)
        difference = samples.spread(samples.mean(difference) if level == "geometric" else total)
    weights = difference.exp()
    if mode == "truncate":
        weights = weights if high is None else weights.clamp(max=high)
    elif mode == "kpop":
        ours, theirs = (apply_mask(x, mask) for x in (log_probs, rollout_log_probs))
        largest = torch.maximum(compute_binary_kl(ours, theirs), compute_binary_kl(theirs, ours))
        weights = apply_mask(weights, largest <= max_kl)
    else:
        inside = torch.ones_like(mask)
        if low is not None:
            inside = inside & (weights >= low)
        if high is not None:
            inside = inside & (weights <= high)
        weights = apply_mask(weights, inside)
    return apply_mask(weights, mask)


@torch.no_grad()
def mask_far_negatives(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    limit: float,
    segments: TokenSegments,
) -> Tensor:
    """Return bool ``[tokens]``: false for tokens of negative advantage in answers whose mean
    rollout_log_probs - log_probs exceeds ``limit``, which the policy has left behind already.

    Off-policy sequence masking, DeepSeek-V3.2 (arXiv:2512.02556).
    """
    gap = segments.mean(apply_mask(rollout_log_probs - log_probs, segments.mask))
    return (advantages >= 0) | (gap <= limit)[segments.row]
