"""Policy losses per token.

A policy loss is ``f(log_probs, old_log_probs, advantages, **options)``.
Tokens may be padded ``[rows, time]`` or packed ``[tokens]``; all tensors have one shape. With
d = clamp(log_probs - old_log_probs, -20, 20) the probability ratio is r = exp(d), and A stands
for the advantages. The gradient goes to ``log_probs`` only.

Every loss returns the metrics ``clip_fraction``, ``dual_clip_fraction``, ``approx_kl`` (-d) and
``ratio``, per token and detached. Every loss takes an optional ``mask``: off it the inputs are
replaced before any arithmetic, so that the loss, the metrics and the gradient are exactly 0
there whatever the inputs were. A loss that takes ``segments`` uses their mask by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.segments import (
    apply_mask,
    as_float,
)
from hybridrl.algorithms.token_loss import TokenLoss
from hybridrl.errors import ConfigError


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    mask: Tensor | None = None,
) -> TokenLoss:
    """Return the clipped PPO loss, max(-A r, -A clamp(r, 1 - clip_low, 1 + clip_high)).

    With ``dual_clip`` c > 1, where A < 0: the minimum of that and -A c, which bounds the loss of
    a bad token that has become likely. ``clip_high > clip_low`` is DAPO's clip-higher.
    Schulman 2017, arXiv:1707.06347, equation 7; dual clip: Ye 2020, arXiv:1912.09729; DAPO: Yu
    2025, arXiv:2503.14476.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ConfigError(f"`dual_clip` is {dual_clip}; expected a number above 1, or none.")
    log_probs, difference, advantages = prepare_loss_inputs(
        log_probs, old_log_probs, advantages, mask
    )
    ratio = difference.exp()
    loss, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    dual_clipped = torch.zeros_like(loss, dtype=torch.bool)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        dual_clipped = (advantages < 0) & (loss > ceiling)
        loss = torch.where(dual_clipped, ceiling, loss)
    return build_token_loss(loss, ratio, difference, mask, clipped, dual_clipped)


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mask: Tensor | None = None,
) -> TokenLoss:
    """Return the CISPO loss, -sg(clamp(r, 1 - clip_low, 1 + clip_high)) A log_probs.

    The weight is clipped, not the update: every token keeps a gradient.
    CISPO: MiniMax-M1 2025, arXiv:2506.13585.
    """
    log_probs, difference, advantages = prepare_loss_inputs(
        log_probs, old_log_probs, advantages, mask
    )
    ratio = difference.detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return build_token_loss(
        -weight * advantages * log_probs, ratio, difference, mask, weight != ratio
    )


def reinforce(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
) -> TokenLoss:
    """Return the plain policy gradient, -A log_probs; old_log_probs serve the metrics only.

    Williams 1992, Machine Learning 8.
    """
    log_probs, difference, advantages = prepare_loss_inputs(
        log_probs, old_log_probs, advantages, mask
    )
    return build_token_loss(-advantages * log_probs, difference.exp(), difference, mask)


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    mask: Tensor | None = None,
) -> TokenLoss:
    """Return the SAPO loss, -A sigmoid(tau (r - 1)) 4 / tau, with tau by the sign of A.

    A soft gate in place of a clip: at r = 1 the gradient is that of -A r, and it fades with the
    distance from there. SAPO: Gao 2025, arXiv:2511.20347.
    """
    for name, value in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        if value <= 0:
            raise ConfigError(f"`{name}` is {value}; expected a positive number.")
    log_probs, difference, advantages = prepare_loss_inputs(
        log_probs, old_log_probs, advantages, mask
    )
    ratio = difference.exp()
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return build_token_loss(-advantages * gate, ratio, difference, mask)


def prepare_loss_inputs(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log_probs, d and A in one dtype, 0 off the mask."""
    log_probs, old_log_probs, advantages = as_float(
        log_probs, old_log_probs.detach(), advantages.detach()
    )
    difference = apply_mask(log_probs - old_log_probs, mask).clamp(-20.0, 20.0)
    return apply_mask(log_probs, mask), difference, apply_mask(advantages, mask)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return the pessimistic clipped loss, and where the clip decided it."""
    free = -advantages * ratio
    held = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(free, held), held > free


def build_token_loss(
    loss: Tensor,
    ratio: Tensor,
    difference: Tensor,
    mask: Tensor | None,
    clipped: Tensor | None = None,
    dual_clipped: Tensor | None = None,
) -> TokenLoss:
    """Return a loss with its metrics, all 0 off the mask."""
    none = torch.zeros_like(loss)
    metrics = {
        "clip_fraction": none if clipped is None else clipped,
        "dual_clip_fraction": none if dual_clipped is None else dual_clipped,
        "approx_kl": -difference,
        "ratio": ratio,
    }
    return TokenLoss(
        apply_mask(loss, mask),
        {name: apply_mask(x.detach().to(loss.dtype), mask) for name, x in metrics.items()},
    )
