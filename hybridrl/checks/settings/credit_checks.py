"""Checks of settings that say how rewards become advantages."""

from __future__ import annotations

from hybridrl.algorithms.policy_objective import (
    ADVANTAGE_ESTIMATORS,
    find_advantage_estimator,
    has_parameter,
)
from hybridrl.config.schema import Config, is_served
from hybridrl.data.mixture import find_source_rewards
from hybridrl.errors import ConfigError
from hybridrl.trainers import PROGRAM_NAMES, load_trainer
from hybridrl.trainers.policy_trainer import list_separate_rewards

_STEP_ESTIMATORS = ("group_relative", "reinforce_plus_plus")


def is_built_in(config: Config) -> bool:
    """Return whether the job's trainer is one of the library."""
    return config.trainer.name in PROGRAM_NAMES


def find_uses(config: Config) -> frozenset[str]:
    """Return what the trainer reads of the settings that not every trainer does."""
    return frozenset(load_trainer(config.trainer.name).USES)


def check_advantages(config: Config) -> None:
    algorithm, name = config.algorithm, config.trainer.name
    per_prompt = config.rollout.samples_per_prompt
    estimator = find_advantage_estimator(algorithm.advantage)
    if not is_built_in(config):
        return
    if "algorithm.advantage" not in find_uses(config):
        if per_prompt == 1 and load_trainer(name).COMPARES_SAMPLES:
            raise ConfigError(
                f"rollout.samples_per_prompt=1: trainer.name={name} learns from the best and the "
                "worst sample of a prompt, so it needs at least 2."
            )
        return
    if per_prompt == 1 and has_parameter(estimator, "groups"):
        raise ConfigError(
            f"rollout.samples_per_prompt=1: algorithm.advantage={algorithm.advantage} compares the "
            "samples of one prompt with each other, so it needs at least 2."
        )
    if per_prompt == 1 and algorithm.dynamic_sampling:
        raise ConfigError(
            "algorithm.dynamic_sampling=true with rollout.samples_per_prompt=1: a single sample "
            "never differs from itself, so every prompt would be thrown away. Draw 2 or more."
        )
    below_zero = {
        "algorithm.overlong_buffer": algorithm.overlong_buffer,
        "algorithm.kl_in_reward": algorithm.kl_in_reward,
        "reward.normalise_by": config.reward.normalise_by,
    }
    setting = next((name for name, value in below_zero.items() if value), None)
    if setting and algorithm.advantage == "maximum_likelihood":
        raise ConfigError(
            f"{setting}={below_zero[setting]} makes scores negative, and algorithm.advantage="
            "maximum_likelihood divides by their mean. Leave one of the two out."
        )
    if algorithm.advantage_scale != "std" and not has_parameter(estimator, "scale"):
        scaled = [
            name for name, known in ADVANTAGE_ESTIMATORS.items() if has_parameter(known, "scale")
        ]
        raise ConfigError(
            f"algorithm.advantage_scale={algorithm.advantage_scale}: "
            f"algorithm.advantage={algorithm.advantage} has no scale of its own; only "
            f"{' and '.join(scaled)} have. Leave it out."
        )


def check_separate_rewards(config: Config) -> None:
    """Refuse what changes only the sum of the rewards, if the estimator reads each by itself."""
    algorithm, reward = config.algorithm, config.reward
    estimator = find_advantage_estimator(algorithm.advantage)
    is_read = "algorithm.advantage" in find_uses(config)
    if not (is_read and has_parameter(estimator, "reward_scores")):
        return
    name = f"algorithm.advantage={algorithm.advantage}"
    if not list_separate_rewards(config):
        raise ConfigError(
            f"{name} learns from the scores of reward functions, and there is none. Name them in "
            "reward.function, or choose another advantage."
        )
    if sources := find_source_rewards(config.data):
        raise ConfigError(
            f"{name} learns from the same rewards everywhere, and the source {next(iter(sources))} "
            "has reward functions of its own. Name all functions in reward.function."
        )
    if algorithm.turn_credit == "turn":
        raise ConfigError(
            f"algorithm.turn_credit=turn with {name}, which learns from each reward by itself: "
            "functions score whole samples, not turns. Leave one of them out."
        )
    only_sum = {
        "algorithm.overlong_buffer": algorithm.overlong_buffer,
        "algorithm.kl_in_reward": str(algorithm.kl_in_reward).lower() * algorithm.kl_in_reward,
        "reward.shorter": reward.shorter,
        "reward.normalise_by": reward.normalise_by,
    }
    for setting, value in only_sum.items():
        if value and not has_parameter(estimator, "scores"):
            raise ConfigError(
                f"{setting}={value}: it changes the sum of a sample's rewards, and {name} learns "
                "from each reward by itself. Leave it out."
            )


def check_turn_credit(config: Config) -> None:
    rollout = config.rollout
    if config.algorithm.turn_credit != "turn":
        return
    if rollout.episode is None and not is_served(rollout, config.environment):
        raise ConfigError(
            "algorithm.turn_credit=turn, but samples have one turn. Name what takes the others: "
            "rollout.episode or environment.name; or set algorithm.turn_credit=episode."
        )


def check_step_credit(config: Config) -> None:
    """Refuse step rewards if the program or advantage estimator does not use them."""
    algorithm = config.algorithm
    if config.reward.model_steps is not None and algorithm.step_credit is None:
        raise ConfigError(
            f"reward.model_steps={config.reward.model_steps!r} has the reward model score steps, "
            "and nothing gives them credit. Set algorithm.step_credit=sum (or min)."
        )
    if config.cost is not None and config.cost.model_steps is not None:
        raise ConfigError(
            f"cost.model_steps={config.cost.model_steps!r}: only rewards come step by step. Leave "
            "it out."
        )
    if algorithm.step_credit is None:
        return
    if is_served(config.rollout, config.environment) or algorithm.turn_credit == "turn":
        raise ConfigError(
            f"algorithm.step_credit={algorithm.step_credit}: samples of an environment, or of "
            "turns that have credit of their own (algorithm.turn_credit=turn), are not cut into "
            "steps. Leave it out."
        )
    compares = is_built_in(config) and "algorithm.advantage" in find_uses(config)
    if compares and algorithm.advantage not in _STEP_ESTIMATORS:
        raise ConfigError(
            f"algorithm.step_credit={algorithm.step_credit}: algorithm.advantage="
            f"{algorithm.advantage} compares whole samples. Use one of "
            f"{', '.join(_STEP_ESTIMATORS)}, or leave it out."
        )


def check_shaping(config: Config) -> None:
    """Refuse to shape rewards where that means nothing."""
    reward = config.reward
    if config.cost is not None and (config.cost.shorter or config.cost.normalise_by):
        raise ConfigError(
            "cost.shorter and cost.normalise_by would move the limit of the cost. Leave them out."
        )
    algorithm = config.algorithm
    by_parts = {"turn_credit=turn": algorithm.turn_credit == "turn"}
    by_parts[f"step_credit={algorithm.step_credit}"] = algorithm.step_credit is not None
    for setting in (one for one, is_set in by_parts.items() if is_set and reward.normalise_by):
        raise ConfigError(
            f"reward.normalise_by={reward.normalise_by} with algorithm.{setting}: scores would "
            "have another scale than the rewards of their parts. Leave one of them out."
        )
    if reward.shorter and config.rollout.samples_per_prompt == 1 and is_built_in(config):
        raise ConfigError(
            f"reward.shorter={reward.shorter} compares the samples of a prompt, and "
            "rollout.samples_per_prompt=1. Draw 2 or more."
        )
