"""Policy losses whose ratio belongs to the whole response rather than to one token.

They take the `TokenSegments` of the tokens, and a micro-batch must hold whole answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.policy_losses import (
    build_token_loss,
    clipped_surrogate,
    prepare_loss_inputs,
)
from hybridrl.algorithms.segments import TokenSegments
from hybridrl.algorithms.token_loss import TokenLoss


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    segments: TokenSegments,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """Return the GSPO loss: `ppo_clip` with r_t = exp(min(10, sg(m) + log_probs - sg(log_probs))).

    m is the mean over the answer of log_probs - old_log_probs, so the value of r_t is the
    length-normalised ratio of the answer and its gradient that of the token. Aggregated with
    ``seq-mean-token-mean`` the gradient is that of the objective per answer.
    GSPO: Zheng 2025, arXiv:2507.18071, in its token form; the default clip range is the paper's.
    """
    mask = segments.mask
    log_probs, difference, advantages = prepare_loss_inputs(
        log_probs, old_log_probs, advantages, mask
    )
    mean = segments.spread(segments.mean((log_probs - old_log_probs).detach()))
    # Subtracted first, the log-probability cancels exactly; added to the mean first, it would
    # round it by as much as the narrow clip range can see.
    ratio = (mean + (log_probs - log_probs.detach())).clamp(max=10.0).exp()
    loss, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    return build_token_loss(loss, ratio, difference, mask, clipped)


def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    segments: TokenSegments,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> TokenLoss:
    """Return the GMPO loss, -A R, with R the geometric mean of the response's clipped token ratios.

    Per token the log-ratio d is clipped against the sign of A, to min(d, clip_high) where A > 0
    and to max(d, -clip_low) elsewhere; R is exp of the mean. One wild token moves a geometric
    mean far less than an arithmetic one.
    GMPO: Zhao 2025, arXiv:2507.20673, with its token-level clip.
    """
    mask = segments.mask
    log_probs, difference, advantages = prepare_loss_inputs(
        log_probs, old_log_probs, advantages, mask
    )
    held = torch.where(
        advantages > 0, difference.clamp(max=clip_high), difference.clamp(min=-clip_low)
    )
    ratio = segments.spread(segments.mean(held)).exp()
    return build_token_loss(-advantages * ratio, ratio, difference, mask, held != difference)


def vespo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    segments: TokenSegments,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> TokenLoss:
    """Return the VESPO loss, -sg(W^k exp(lambda (1 - W))) A log_probs.

    k and lambda depend on the sign of A. W is the ratio of the whole response, the product of
    those of its tokens. Its weight is 1 at W = 1 and fades towards 0 and infinity, so no length has
    to be taken out of W and nothing is clipped. VESPO: Shen 2026, arXiv:2602.10693.
    """
    mask = segments.mask
    log_probs, difference, advantages = prepare_loss_inputs(
        log_probs, old_log_probs, advantages, mask
    )
    log_ratio = segments.spread(segments.sum(difference.detach())).clamp(-20.0, 20.0)
    is_good = advantages >= 0
    k = torch.full_like(log_ratio, k_negative).masked_fill(is_good, k_positive)
    fall = torch.full_like(log_ratio, lambda_negative).masked_fill(is_good, lambda_positive)
    weight = (k * log_ratio + fall * (1.0 - log_ratio.exp())).exp()
    return build_token_loss(-weight * advantages * log_probs, log_ratio.exp(), difference, mask)
