"""The loss of a policy update, composed of its terms by settings, and the losses and advantages
that settings name: built-in functions and the user's own.

A function is given what its parameters name, so one that compares scores need not speak of tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from torch import Tensor

from hybridrl.algorithms.advantages import reinforce_plus_plus
from hybridrl.algorithms.group_advantages import (
    gdpo,
    group_relative,
    leave_one_out,
    maximum_likelihood,
    optimal_reward_baseline,
    pass_at_k,
    reinforce_plus_plus_baseline,
)
from hybridrl.algorithms.importance_correction import importance_weights, mask_far_negatives
from hybridrl.algorithms.kl_divergence import LOSS_KL_ESTIMATOR, estimate_kl
from hybridrl.algorithms.policy_losses import cispo, ppo_clip, reinforce, sapo
from hybridrl.algorithms.segments import TokenSegments, apply_mask, check_known_name
from hybridrl.algorithms.sequence_losses import gmpo, gspo, vespo
from hybridrl.algorithms.token_loss import TokenLoss
from hybridrl.algorithms.trust_region_losses import dppo_kl, dppo_tv
from hybridrl.errors import ConfigError
from hybridrl.system import user_code

_Function = Callable[..., Any]


def _reinforce_plus_plus(
    rewards: Tensor, mask: Tensor, gamma: float, segments: TokenSegments
) -> Tensor:
    return reinforce_plus_plus(rewards, mask, gamma, segments=segments)[0]


_POLICY_LOSSES: Mapping[str, _Function] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "sapo": sapo,
    "gmpo": gmpo,
    "vespo": vespo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}
SAMPLER_ANCHORED_LOSSES = ("vespo", "dppo_tv", "dppo_kl")
"""Losses that bound how far the policy is from the one that sampled: without a correction their
ratios are to `rollout_log_probs`, also where samples are fresh."""
ADVANTAGE_ESTIMATORS: Mapping[str, _Function] = {
    "group_relative": group_relative,
    "leave_one_out": leave_one_out,
    "optimal_reward_baseline": optimal_reward_baseline,
    "pass_at_k": pass_at_k,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "maximum_likelihood": maximum_likelihood,
    "gdpo": gdpo,
}
_LOSS_PARAMETERS = ("log_probs", "old_log_probs", "advantages", "mask", "segments")
_ADVANTAGE_PARAMETERS = (
    "scores",
    "groups",
    "mask",
    "lengths",
    "rewards",
    "segments",
    "scale",
    "gamma",
    "reward_scores",
    "reward_weights",
)
GROUPWISE_ADVANTAGES = (
    *("group_relative", "leave_one_out", "optimal_reward_baseline", "pass_at_k"),
    "maximum_likelihood",
)
"""Advantages that depend on no other group, but for the scale `batch`."""


@cache
def find_policy_loss(name: str) -> _Function:
    """Return the function of `algorithm.policy_loss`: from `log_probs`, `old_log_probs` and
    `advantages`, each `[tokens]`, to `TokenLoss`. It may also name `mask`, `segments`, and options
    with defaults.

    Raises:
        ConfigError: if there is none, or it needs something else.
    """
    return _load("algorithm.policy_loss", name, _POLICY_LOSSES, _LOSS_PARAMETERS)


@cache
def find_advantage_estimator(name: str) -> _Function:
    """Return the function of `algorithm.advantage`: from any of `scores`, `groups` and `lengths`
    `[rows]`, `mask` and `rewards` `[rows, time]`, `reward_scores` `[rows, rewards]` with
    `reward_weights` `[rewards]`, and the settings `scale` and `gamma`, to advantages of rows or of
    tokens. One that names `segments` too is given `mask` and `rewards`
    packed, `[tokens]`, and returns advantages of tokens, so that nothing is ever padded.

    Raises:
        ConfigError: if there is none, or it needs something else.
    """
    return _load("algorithm.advantage", name, ADVANTAGE_ESTIMATORS, _ADVANTAGE_PARAMETERS)


def uses_policy_ratio(name: str) -> bool:
    """Return whether a policy loss weighs tokens by the ratio to the policy that sampled them."""
    return name != "reinforce" and has_parameter(find_policy_loss(name), "old_log_probs")


def bounds_older_samples(name: str) -> bool:
    """Return whether a policy loss itself weighs and bounds samples of an older policy where its
    ratios are to that policy. Not `gspo`, whose clip range of 0.0004 leaves next to nothing."""
    return uses_policy_ratio(name) and name != "gspo"


def has_parameter(function: _Function, parameter: str) -> bool:
    """Return whether a function has a parameter of this name."""
    return parameter in inspect.signature(function).parameters


def filter_arguments(function: _Function, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Select from `offered` the arguments that the function has parameters for."""
    return {name: value for name, value in offered.items() if has_parameter(function, name)}


def list_loss_options(function: _Function) -> list[str]:
    """Return the names of a policy loss's options."""
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name for p in parameters if p.default is not p.empty and p.name not in _LOSS_PARAMETERS
    ]


def _load(
    setting: str, name: str, known: Mapping[str, _Function], offered: tuple[str, ...]
) -> _Function:
    function: _Function = user_code.resolve_user_object(setting, name, known)
    if not callable(function):
        raise ConfigError(
            f"{setting}={name} is a {type(function).__name__}; it must be a function."
        )
    if not any(has_parameter(function, name) for name in offered):
        raise ConfigError(
            f"{setting}={name} has none of the parameters {', '.join(offered)}, so it could learn "
            "nothing from a sample. Name those that it needs."
        )
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is parameter.empty and parameter.name not in offered:
            raise ConfigError(
                f"{setting}={name} has the parameter `{parameter.name}`, which nobody gives it. "
                f"Name any of {', '.join(offered)}, or give it a default."
            )
    return function


CORRECTION_MODES = ("none", "truncate", "mask", "kpop")


@dataclass(frozen=True)
class PolicyObjective:
    """The objective w * policy loss + kl_coefficient * KL(policy, reference) - entropy_coefficient
    * entropy, where w corrects the gap between trainer and rollout engine, or is 1.

    Attributes:
        policy_loss: See `find_policy_loss`.
        options: Its keyword options.
        kl_coefficient: With a value other than 0 the column `ref_log_probs` is needed.
        kl_estimator: See `estimate_kl`; None: `LOSS_KL_ESTIMATOR`.
        entropy_coefficient: Weight of the entropy bonus.
        correction: `none`, or the mode of `importance_weights`, of which `correction_level`,
            `correction_low`, `correction_high` and `correction_kl` are the other arguments. Its
            column is `rollout_log_probs`.
        off_policy: The samples are of an older policy than the one at the beginning of the step.
            Without a correction the ratios of the policy loss are then those to the policy that
            sampled, `rollout_log_probs`: the loss itself corrects, within its clip range. Those of
            `SAMPLER_ANCHORED_LOSSES` always are.
        negative_kl_max: See `mask_far_negatives`; None: every token counts.
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
    correction_kl: float = 0.1
    off_policy: bool = False
    negative_kl_max: float | None = None
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
        anchored = self.off_policy or self.policy_loss in SAMPLER_ANCHORED_LOSSES
        by_ratio = anchored and not corrected
        old = columns["rollout_log_probs"] if by_ratio else begun
        loss, metrics = self._policy_loss(log_probs, old, columns["advantages"], segments)
        metrics = {**metrics, "entropy": entropy.detach()}
        if "log_probs" in columns:
            metrics["step_kl"] = estimate_kl(begun, log_probs.detach(), "k3", mask=mask)
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
                self.correction_kl,
                segments=segments,
            )
            loss = loss * weights
            metrics["correction_weight"] = weights
        if self.negative_kl_max is not None:
            rollout, advantages = columns["rollout_log_probs"], columns["advantages"]
            near = mask_far_negatives(
                log_probs, rollout, advantages, self.negative_kl_max, segments
            )
            loss = loss * near
            metrics["masked_fraction"] = (~near & segments.mask).to(loss.dtype)
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
        """Measure how far the trainer's log-probabilities are from the rollout engine's, per token:
        k1 and k3 of KL(rollout || trainer), the absolute gap, and the importance weight with its
        square; and per row the trainer's perplexity over the engine's."""
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
