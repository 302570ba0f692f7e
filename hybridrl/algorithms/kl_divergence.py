"""The KL divergence from a reference policy: estimators, and controllers of its coefficient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.segments import apply_mask, as_float, check_known_name
from hybridrl.errors import ConfigError

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
        """Restore what `state` returned."""
        self.coefficient = state["coefficient"]
