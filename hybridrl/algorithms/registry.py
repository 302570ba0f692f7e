"""The losses and advantages that settings name: built-in functions and the user's own.

A function is given what its parameters name, so one that compares scores need not speak of tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from hybridrl.algorithms.advantages import reinforce_plus_plus
from hybridrl.algorithms.group_advantages import (
    group_relative,
    leave_one_out,
    optimal_reward_baseline,
    pass_at_k,
    reinforce_plus_plus_baseline,
)
from hybridrl.algorithms.policy_losses import cispo, ppo_clip, reinforce, sapo
from hybridrl.algorithms.segments import TokenSegments
from hybridrl.algorithms.sequence_losses import gmpo, gspo
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
}
ADVANTAGE_ESTIMATORS: Mapping[str, _Function] = {
    "group_relative": group_relative,
    "leave_one_out": leave_one_out,
    "optimal_reward_baseline": optimal_reward_baseline,
    "pass_at_k": pass_at_k,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
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
)
GROUPWISE_ADVANTAGES = ("group_relative", "leave_one_out", "optimal_reward_baseline", "pass_at_k")
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
    `[rows]`, `mask` and `rewards` `[rows, time]`, and the settings `scale` and `gamma`, to
    advantages of rows or of tokens. One that names `segments` too is given `mask` and `rewards`
    packed, `[tokens]`, and returns advantages of tokens, so that nothing is ever padded.

    Raises:
        ConfigError: if there is none, or it needs something else.
    """
    return _load("algorithm.advantage", name, ADVANTAGE_ESTIMATORS, _ADVANTAGE_PARAMETERS)


def uses_policy_ratio(name: str) -> bool:
    """Return whether a policy loss weighs tokens by the ratio to the policy that sampled them."""
    return name != "reinforce" and has_parameter(find_policy_loss(name), "old_log_probs")


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
