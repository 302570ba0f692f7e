"""The terms of a policy update's loss: policy losses per token, the divergence from a reference
policy with the controllers of its coefficient, and the weight of each token.

A policy loss is ``f(log_probs, old_log_probs, advantages, **options)``.
Tokens may be padded ``[rows, time]`` or packed ``[tokens]``; all tensors have one shape. With
d = clamp(log_probs - old_log_probs, -20, 20) the probability ratio is r = exp(d), and A stands
for the advantages. The gradient goes to ``log_probs`` only.

Every loss returns the metrics ``clip_fraction``, ``dual_clip_fraction``, ``approx_kl`` (-d) and
``ratio``, per token and detached. Every loss takes an optional ``mask``: off it the inputs are
replaced before any arithmetic, so that the loss, the metrics and the gradient are exactly 0
there whatever the inputs were. A loss that takes ``segments`` uses their mask by itself.

Token weights are made once, on the global mini-batch, and travel with the tokens. The loss is then
a plain sum, and a sum may be split over micro-batches, ranks and sequence parts in any way without
changing the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.segments import (
    TokenSegments,
    apply_mask,
    as_float,
    check_known_name,
    resolve_segments,
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


KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+")
REWARD_KL_ESTIMATOR = "k1"
"""The estimator of a KL in the reward: through the policy gradient no other has the gradient of the
divergence. Near the reference k3 has a few per cent of it, in another direction."""
LOSS_KL_ESTIMATOR = "k3+"
"""The estimator of a KL in the loss."""


def estimate_kl(
    log_probs: Tensor, ref_log_probs: Tensor, estimator: str, *, mask: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy || reference) per token, from the log-probabilities of sampled tokens.

    With x = log_probs - ref_log_probs: ``k1`` x; ``k2`` x^2 / 2; ``k3`` exp(-x) + x - 1, with x
    clamped to +-20 and the value to +-10; ``abs`` |x|. Schulman 2020,
    http://joschu.net/blog/kl-approx.html.

    A suffix ``+`` keeps the value and takes the gradient of k2 instead (straight-through). As a
    loss, k2 is the one whose expected gradient is that of the divergence: k1's is 0, and k3's is
    that of the opposite direction and vanishes where its value is clamped (x < -2.6). In a reward
    only the value counts: see `REWARD_KL_ESTIMATOR`.

    Shapes: any, all alike. The gradient goes to ``log_probs`` only. With a ``mask`` the result
    is 0 off it, for any input there.
    """
    check_known_name("estimator", estimator, KL_ESTIMATORS)
    log_probs, ref_log_probs = as_float(log_probs, ref_log_probs.detach())
    x = apply_mask(log_probs - ref_log_probs, mask)
    name = estimator.removesuffix("+")
    if name == estimator:
        return _value(x, name)
    k2 = _value(x, "k2")
    return _value(x.detach(), name) + (k2 - k2.detach())


def _value(x: Tensor, name: str) -> Tensor:
    if name == "k1":
        return x
    if name == "k2":
        return 0.5 * x.square()
    if name == "abs":
        return x.abs()
    x = x.clamp(-20.0, 20.0)
    # expm1 keeps the digits that exp(-x) - 1 would cancel: x is small for most tokens.
    return (torch.expm1(-x) + x).clamp(-10.0, 10.0)


@dataclass
class FixedKLController:
    """A KL coefficient that does not change."""

    coefficient: float

    def update(self, current: float, steps: int) -> None:
        """Do nothing; both controllers are called alike."""

    def state(self) -> dict[str, float]:
        """Return nothing: a fixed coefficient is a setting."""
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """Do nothing."""


class AdaptiveKLController:
    """A KL coefficient that steers the divergence towards a target.

    `update` multiplies it by 1 + clip(current / target - 1, -0.2, 0.2) * steps / horizon.
    Ziegler 2019, arXiv:1909.08593, section 2.2.
    """

    def __init__(self, initial: float, target: float, horizon: float) -> None:
        if target <= 0:
            raise ConfigError(f"The KL `target` is {target}; expected a positive number.")
        if horizon <= 0:
            raise ConfigError(f"The KL `horizon` is {horizon}; expected a positive number.")
        self.coefficient = initial
        self.target = target
        self.horizon = horizon

    def update(self, current: float, steps: int) -> None:
        """Move the coefficient after `steps` samples with a mean divergence of `current`.

        A divergence that is not a number is passed over; it would stay in the coefficient for
        good.
        """
        if 0.2 * steps >= self.horizon:
            raise ConfigError(
                f"The KL `horizon` is {self.horizon} and an update counts {steps} steps; with "
                f"fewer than {0.2 * steps:g} the coefficient could turn negative. Raise it."
            )
        error = float(current) / self.target - 1.0
        if not math.isnan(error):
            self.coefficient *= 1.0 + min(max(error, -0.2), 0.2) * steps / self.horizon

    def state(self) -> dict[str, float]:
        """Return what a resumed job needs to continue."""
        return {"coefficient": self.coefficient}

    def load_state(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self.coefficient = state["coefficient"]


AGGREGATION_MODES = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-sum",
)


@torch.no_grad()
def token_weights(
    mask: Tensor,
    mode: str,
    *,
    length_norm: float | None = None,
    segments: TokenSegments | None = None,
) -> Tensor:
    """Compute weights shaped like the mask, such that the loss is ``(weights * loss).sum()``.

    mask: ``[rows, time]``, or packed ``[tokens]`` with ``segments`` telling the rows. Weights
    are float32 (float64 for a float64 mask) and 0 off the mask; an empty mask gives only zeros.

    With n the number of rows that have tokens, a token of a row of l tokens weighs

    * ``token-mean``: 1 / number of tokens (DAPO, arXiv:2503.14476)
    * ``seq-mean-token-mean``: 1 / (n l) (GRPO, arXiv:2402.03300)
    * ``seq-mean-token-sum``: 1 / n
    * ``seq-mean-token-sum-norm``: 1 / (n length_norm) (Dr. GRPO, arXiv:2503.20783)
    * ``token-sum``: 1

    length_norm: the longest allowed response; without it, the time dimension of a padded mask.
    Raises `ConfigError` for an unknown mode, and for packed tokens without ``length_norm`` in
    the mode that needs it: a pack does not tell how long a response might have been.
    """
    check_known_name("mode", mode, AGGREGATION_MODES)
    dtype = torch.float64 if mask.dtype == torch.float64 else torch.float32
    padded = segments is None
    segments = resolve_segments(mask, segments)
    held = segments.mask
    lengths = segments.lengths.to(dtype)
    rows = (lengths > 0).sum().clamp(min=1).to(dtype)

    if mode == "token-mean":
        weight = 1.0 / lengths.sum().clamp(min=1)
    elif mode == "seq-mean-token-mean":
        weight = segments.spread(1.0 / (rows * lengths.clamp(min=1)))
    elif mode == "seq-mean-token-sum":
        weight = 1.0 / rows
    elif mode == "seq-mean-token-sum-norm":
        weight = 1.0 / (rows * _length_norm(held, length_norm, padded))
    else:
        weight = torch.ones_like(rows)
    return apply_mask(weight.expand(held.shape), held)


def _length_norm(mask: Tensor, length_norm: float | None, padded: bool) -> float:
    if length_norm is None and not padded:
        raise ConfigError(
            "`length_norm` is not set, and packed tokens do not tell the longest allowed "
            "response; the mode `seq-mean-token-sum-norm` needs it. Set it to that length."
        )
    if length_norm is None:
        return float(max(mask.shape[-1], 1))
    if length_norm <= 0:
        raise ConfigError(f"`length_norm` is {length_norm}; expected a positive length.")
    return float(length_norm)
