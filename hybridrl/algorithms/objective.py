"""PolicyObjective: the whole loss of a policy update, put together from its parts by settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hybridrl.algorithms.kl import kl
from hybridrl.algorithms.masking import require_known
from hybridrl.algorithms.policy_losses import cispo, ppo_clip, reinforce, sapo
from hybridrl.algorithms.sample_losses import gmpo, gspo
from hybridrl.algorithms.segments import Segments
from hybridrl.algorithms.token_loss import TokenLoss

POLICY_LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "sapo": sapo,
    "gmpo": gmpo,
}
WHOLE_SAMPLE = ("gspo", "gmpo")
"""Losses whose ratio belongs to a whole sample."""


@dataclass(frozen=True)
class PolicyObjective:
    """policy loss + kl_coefficient * KL(policy, reference) - entropy_coefficient * entropy.

    Attributes:
        policy_loss: Name of a policy loss.
        options: Its keyword options.
        kl_coefficient: With a value other than 0 the column `ref_log_probs` is needed.
        kl_estimator: See `kl`.
        entropy_coefficient: Weight of the entropy bonus.
    """

    policy_loss: str = "ppo_clip"
    options: Mapping[str, Any] = field(default_factory=dict)
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        require_known("algorithm.policy_loss", self.policy_loss, POLICY_LOSSES)

    def __call__(
        self,
        log_probs: Tensor,
        entropy: Tensor,
        columns: Mapping[str, Tensor],
        segments: Segments,
    ) -> TokenLoss:
        """Loss per token, `[tokens]`.

        Args:
            log_probs: `[tokens]` of the policy being trained, with gradient.
            entropy: `[tokens]` of its distributions.
            columns: `response_mask`; `advantages`; `log_probs` of the policy at the beginning of
                the step, which is the one being trained where the column is missing (the first
                update of a step); `rollout_log_probs` for the mismatch metrics; `ref_log_probs`
                for the KL.
            segments: The samples that the tokens belong to.
        """
        old = columns.get("log_probs", log_probs.detach())
        mask = columns["response_mask"]
        scope = {"segments": segments} if self.policy_loss in WHOLE_SAMPLE else {"mask": mask}
        loss, metrics = POLICY_LOSSES[self.policy_loss](
            log_probs, old, columns["advantages"], **self.options, **scope
        )
        metrics = {**metrics, "entropy": entropy.detach()}
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * entropy
        if self.kl_coefficient:
            divergence = kl(log_probs, columns["ref_log_probs"], self.kl_estimator, mask=mask)
            loss = loss + self.kl_coefficient * divergence
            metrics["kl"] = divergence.detach()
        if "rollout_log_probs" in columns:
            rollout = columns["rollout_log_probs"]
            metrics["mismatch_k3"] = kl(rollout, old.detach(), "k3", mask=mask)
            metrics["mismatch_abs_max"] = (rollout - old.detach()).abs()
        return TokenLoss(loss, metrics)
