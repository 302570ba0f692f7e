"""The loss of a policy update, composed of its terms by settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from hybridrl.algorithms.corrections import importance_weights
from hybridrl.algorithms.kl import LOSS_KL_ESTIMATOR, estimate_kl
from hybridrl.algorithms.registry import filter_arguments, find_policy_loss
from hybridrl.algorithms.segments import TokenSegments, apply_mask, check_known_name
from hybridrl.algorithms.token_loss import TokenLoss
from hybridrl.errors import ConfigError

CORRECTION_MODES = ("none", "truncate", "mask")


@dataclass(frozen=True)
class PolicyObjective:
    """The objective w * policy loss + kl_coefficient * KL(policy, reference) - entropy_coefficient
    * entropy, where w corrects the gap between trainer and rollout engine, or is 1.

    Attributes:
        policy_loss: See `registry.policy_loss`.
        options: Its keyword options.
        kl_coefficient: With a value other than 0 the column `ref_log_probs` is needed.
        kl_estimator: See `estimate_kl`; None: `kl.IN_LOSS`.
        entropy_coefficient: Weight of the entropy bonus.
        correction: `none`, or the mode of `importance_weights`, of which `correction_level`, `_low`
            and `_high` are the other arguments. Its column is `rollout_log_probs`.
        off_policy: The samples are of an older policy than the one at the beginning of the step.
            Without a correction the ratios of the policy loss are then those to the policy that
            sampled, `rollout_log_probs`: the loss itself corrects, within its clip range.
        needs: Columns without which there is nothing to learn.
    """

    policy_loss: str = "ppo_clip"
    options: Mapping[str, Any] = field(default_factory=dict)
    kl_coefficient: float = 0.0
    kl_estimator: str | None = None
    entropy_coefficient: float = 0.0
    correction: str = "none"
    correction_level: str = "token"
    correction_low: float | None = None
    correction_high: float | None = 2.0
    off_policy: bool = False
    needs: ClassVar = ("advantages",)

    def __post_init__(self) -> None:
        find_policy_loss(self.policy_loss)
        check_known_name("algorithm.correction", self.correction, CORRECTION_MODES)

    def __call__(
        self,
        outputs: Mapping[str, Tensor],
        columns: Mapping[str, Tensor],
        segments: TokenSegments,
    ) -> TokenLoss:
        """Return the loss per token, `[tokens]`.

        Args:
            outputs: `log_probs` of the policy being trained, with gradient, and `entropy` of its
                distributions.
            columns: `response_mask`; `advantages`; `log_probs` of the policy at the beginning of
                the step, which is the one being trained where the column is missing (the first
                update of a step); `rollout_log_probs` for the mismatch metrics, a correction, and
                samples of an older policy; `ref_log_probs` for the KL.
            segments: The samples that the tokens belong to.
        """
        log_probs, entropy = outputs["log_probs"], outputs["entropy"]
        begun = columns.get("log_probs", log_probs.detach())
        mask = columns["response_mask"]
        corrected = self.correction != "none"
        by_ratio = self.off_policy and not corrected
        old = columns["rollout_log_probs"] if by_ratio else begun
        loss, metrics = self._policy_loss(log_probs, old, columns["advantages"], segments)
        metrics = {**metrics, "entropy": entropy.detach()}
        if "rollout_log_probs" in columns:
            metrics |= self._mismatch(begun.detach(), columns["rollout_log_probs"], segments)
        if corrected:
            weights = importance_weights(
                begun.detach(),
                columns["rollout_log_probs"],
                mask,
                self.correction_level,
                self.correction,
                self.correction_low,
                self.correction_high,
                segments=segments,
            )
            loss = loss * weights
            metrics["correction_weight"] = weights
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * entropy
        if "ref_log_probs" in columns:
            estimator = self.kl_estimator or LOSS_KL_ESTIMATOR
            divergence = estimate_kl(log_probs, columns["ref_log_probs"], estimator, mask=mask)
            if self.kl_coefficient:
                loss = loss + self.kl_coefficient * divergence
            metrics["kl"] = divergence.detach()
        return TokenLoss(loss, metrics)

    def _policy_loss(
        self, log_probs: Tensor, old: Tensor, advantages: Tensor, segments: TokenSegments
    ) -> TokenLoss:
        function = find_policy_loss(self.policy_loss)
        offered = {
            "log_probs": log_probs,
            "old_log_probs": old,
            "advantages": advantages,
            "mask": segments.mask,
            "segments": segments,
        }
        found = function(**filter_arguments(function, offered), **self.options)
        if not isinstance(found, TokenLoss) or found.loss.shape != log_probs.shape:
            raise ConfigError(
                f"algorithm.policy_loss={self.policy_loss} must return hybridrl.algorithms."
                f"TokenLoss(loss, metrics) with a loss for each of the {len(log_probs)} tokens."
            )
        return found

    @staticmethod
    def _mismatch(old: Tensor, rollout: Tensor, segments: TokenSegments) -> dict[str, Tensor]:
        """How far the trainer's log-probabilities are from the rollout engine's, per token: k1 and
        k3 of KL(rollout || trainer), the absolute gap, and the importance weight with its square;
        and per row the trainer's perplexity over the engine's."""
        gap = apply_mask(rollout - old, segments.mask)
        weight = gap.neg().clamp(-20.0, 20.0).exp()
        return {
            "mismatch_kl": gap,
            "mismatch_k3": estimate_kl(rollout, old, "k3", mask=segments.mask),
            "mismatch_abs_max": gap.abs(),
            "mismatch_weight": weight,
            "mismatch_weight_square": weight.square(),
            "mismatch_ppl_ratio_by_row": segments.mean(gap).exp(),
        }
