"""Checks of settings that the chosen algorithm does not support."""

from __future__ import annotations

from hybridrl.algorithms.policy_objective import (
    ADVANTAGE_ESTIMATORS,
    find_advantage_estimator,
    find_policy_loss,
    has_parameter,
    list_loss_options,
    uses_policy_ratio,
)
from hybridrl.config.effective_settings import unread
from hybridrl.config.schema import Config, CostConfig, CriticConfig, is_served
from hybridrl.errors import ConfigError, ErrorCollector, suggest_name
from hybridrl.trainers import PROGRAM_NAMES, load_roles, load_trainer
from hybridrl.trainers.grpo import compute_max_replayed_prompts
from hybridrl.trainers.objectives import is_off_policy, resolve_correction

_TASK_FUNCTION_PREFIX = "hybridrl.data.tasks."
"""Before the names of functions that built-in tasks bring; presets name them."""
OF_PARTS = ("cost", "preference", "critic.value_clip", "critic.warmup_steps", "critic.epochs")
"""Settings of parts that a trainer has or has not, which `_check_program_groups` tells of."""
_STEP_ESTIMATORS = ("group_relative", "reinforce_plus_plus")


def check_algorithm(config: Config) -> None:
    """Refuse contradictions between algorithm, program and settings, with all of them in one error.

    Raises:
        ConfigError: names the settings and the cure.
    """
    checks = [
        _check_program_groups,
        _check_unread,
        _check_cost,
        _check_lora,
        _check_step_credit,
        _check_shaping,
    ]
    if _learns_from_samples(config):
        checks += [
            _check_advantages,
            _check_turn_credit,
            _check_kl,
            _check_loss,
            _check_on_policy_sampling,
        ]
    problems = ErrorCollector()
    for check in checks:
        with problems.noted():
            check(config)
    problems.raise_if_any()


def _uses(config: Config) -> frozenset[str]:
    """Return what the trainer reads of the settings that not every trainer does."""
    return frozenset(load_trainer(config.trainer.name).USES)


def _is_built_in(config: Config) -> bool:
    return config.trainer.name in PROGRAM_NAMES


def _check_unread(config: Config) -> None:
    """Refuse settings that the trainer does not read, whoever wrote it."""
    name = config.trainer.name
    reasons = load_trainer(name).UNREAD_REASONS
    own = "" if _is_built_in(config) else f", or name it in the USES of {name} if that reads it"
    for setting, value, readers in unread(config, _uses(config)):
        if setting not in OF_PARTS:
            reason = f" ({reasons[setting]})" if setting in reasons else ""
            raise ConfigError(
                f"{setting}={value}: trainer.name={name} does not read it{reason}; it counts with "
                f"{readers}. Leave it out{own}."
            )


def _learns_from_samples(config: Config) -> bool:
    generates = any(spec.generates for spec in load_roles(config).values())
    return bool(load_trainer(config.trainer.name).TRAINS and generates)


def _check_program_groups(config: Config) -> None:
    name = config.trainer.name
    kinds = [spec.worker for spec in load_roles(config).values()]
    if "critic" not in kinds and config.critic != CriticConfig():
        raise ConfigError(
            f"`critic` is set, but trainer.name={name} has no critic. Use algorithm=ppo, or leave "
            "the critic's settings out."
        )
    if (config.cost is not None) != ("cost" in kinds):
        raise ConfigError(
            f"trainer.name={name} with cost={'null' if config.cost is None else '...'}: a cost "
            "belongs to Safe-RLHF and Safe-RLHF needs one. Use algorithm=safe_rlhf, which sets "
            "both."
        )
    learns_pairs = "preference" in _uses(config)
    if (config.preference is not None) != learns_pairs:
        raise ConfigError(
            f"trainer.name={name} with preference="
            f"{'null' if config.preference is None else '...'}: `preference` belongs to learning "
            "from pairs. Use algorithm=dpo, algorithm=online_dpo or algorithm=reward_model, which "
            "set both; a trainer of your own that reads it has it in its USES."
        )
    if learns_pairs and _is_built_in(config) and config.actor.updates_per_step > 1:
        raise ConfigError(
            f"actor.updates_per_step={config.actor.updates_per_step}: trainer.name={name} makes "
            "one update of each step's pairs. Lower data.prompts_per_step for more updates."
        )
    share, prompts = config.algorithm.replay_share, config.data.prompts_per_step
    if share and not compute_max_replayed_prompts(config):
        raise ConfigError(
            f"algorithm.replay_share={share} of a step with data.prompts_per_step={prompts} is "
            f"less than one prompt. Set it to {1 / (prompts + 1):.2g} or more, or leave it out."
        )


def _check_cost(config: Config) -> None:
    cost = config.cost
    if cost is None:
        return
    if config.data.task is None and str(cost.function).startswith(_TASK_FUNCTION_PREFIX):
        raise ConfigError(
            f"cost.function={cost.function} is the cost of a built-in task, and the data is yours. "
            "Name a cost of yours: cost.function=path/to/file.py:name, or cost.function=null "
            "cost.model=<folder or hub name>."
        )
    if cost.correct_at != CostConfig().correct_at:
        raise ConfigError(f"cost.correct_at={cost.correct_at}: no cost is right. Leave it out.")
    if cost.multiplier_max < cost.multiplier:
        raise ConfigError(
            f"cost.multiplier_max={cost.multiplier_max}: must be at least "
            f"cost.multiplier={cost.multiplier}, with which it begins."
        )


def _check_lora(config: Config) -> None:
    lora, warmup, rollout = config.actor.lora, config.warmup.steps, config.rollout
    if rollout.adapters == "separate" and (lora.rank is None or rollout.engine != "vllm"):
        why = "there are none (actor.lora.rank)" if lora.rank is None else "only vLLM takes them"
        raise ConfigError(f"rollout.adapters=separate: {why}. Set rollout.adapters=merged.")
    if lora.rank is None:
        return
    if config.model.path is None:
        raise ConfigError(
            f"actor.lora.rank={lora.rank} adapts a model that knows something, and the tiny one is "
            "made from a seed. Train it first, then set model.path=runs/latest/model "
            "warmup.steps=0."
        )
    if warmup and _learns_from_samples(config):
        raise ConfigError(
            f"warmup.steps={warmup} with actor.lora.rank={lora.rank}: the reference is the model "
            "without its adapters, so warm-up would leave it behind. Set warmup.steps=0."
        )


def _check_advantages(config: Config) -> None:
    algorithm, name = config.algorithm, config.trainer.name
    per_prompt = config.rollout.samples_per_prompt
    estimator = find_advantage_estimator(algorithm.advantage)
    if not _is_built_in(config):
        return
    if "algorithm.advantage" not in _uses(config):
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
    if algorithm.advantage_scale != "std" and not has_parameter(estimator, "scale"):
        scaled = [
            name for name, known in ADVANTAGE_ESTIMATORS.items() if has_parameter(known, "scale")
        ]
        raise ConfigError(
            f"algorithm.advantage_scale={algorithm.advantage_scale}: "
            f"algorithm.advantage={algorithm.advantage} has no scale of its own; only "
            f"{' and '.join(scaled)} have. Leave it out."
        )


def _check_turn_credit(config: Config) -> None:
    rollout = config.rollout
    if config.algorithm.turn_credit != "turn":
        return
    if rollout.episode is None and not is_served(rollout, config.environment):
        raise ConfigError(
            "algorithm.turn_credit=turn, but samples have one turn. Name what takes the others: "
            "rollout.episode or environment.name; or set algorithm.turn_credit=episode."
        )


def _check_step_credit(config: Config) -> None:
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
    compares = _is_built_in(config) and "algorithm.advantage" in _uses(config)
    if compares and algorithm.advantage not in _STEP_ESTIMATORS:
        raise ConfigError(
            f"algorithm.step_credit={algorithm.step_credit}: algorithm.advantage="
            f"{algorithm.advantage} compares whole samples. Use one of "
            f"{', '.join(_STEP_ESTIMATORS)}, or leave it out."
        )


def _check_shaping(config: Config) -> None:
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
    if reward.shorter and config.rollout.samples_per_prompt == 1 and _is_built_in(config):
        raise ConfigError(
            f"reward.shorter={reward.shorter} compares the samples of a prompt, and "
            "rollout.samples_per_prompt=1. Draw 2 or more."
        )


def _check_kl(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.kl_in_reward and not algorithm.kl_coefficient:
        raise ConfigError(
            "algorithm.kl_in_reward=true with algorithm.kl_coefficient=0: there is no KL to take "
            "off. Set algorithm.kl_coefficient."
        )
    if algorithm.kl_target is not None and not algorithm.kl_in_reward:
        raise ConfigError(
            f"algorithm.kl_target={algorithm.kl_target} adapts the KL in the rewards of ppo, remax "
            "and safe_rlhf. Set algorithm.kl_in_reward=true there, or leave the target out."
        )
    samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
    if algorithm.kl_target is not None and algorithm.kl_horizon <= samples:
        raise ConfigError(
            f"algorithm.kl_horizon={algorithm.kl_horizon:g} is not more than the {samples} samples "
            "of a step; the coefficient would jump."
        )


def _check_loss(config: Config) -> None:
    algorithm, correction = config.algorithm, resolve_correction(config)
    bounds = {"truncate": [algorithm.correction_high]}.get(
        correction, [algorithm.correction_low, algorithm.correction_high]
    )
    if correction != "none" and bounds.count(None) == len(bounds):
        raise ConfigError(
            f"algorithm.correction={correction} has no bound. Set algorithm.correction_high."
        )
    low, high = algorithm.correction_low, algorithm.correction_high
    if correction == "mask" and None not in (low, high) and low >= high:  # type: ignore[operator]
        raise ConfigError(
            f"algorithm.correction_low={low}: must be less than algorithm.correction_high={high}, "
            "or every weight would be masked."
        )
    options = list_loss_options(find_policy_loss(algorithm.policy_loss))
    for option in algorithm.loss_options:
        if option not in options:
            raise ConfigError(
                f"algorithm.loss_options has `{option}`, which algorithm.policy_loss="
                f"{algorithm.policy_loss} does not take; it takes {', '.join(options) or 'none'}."
                f"{suggest_name(option, options)}"
            )
    longest = config.rollout.max_tokens
    if algorithm.overlong_buffer > longest:
        raise ConfigError(
            f"algorithm.overlong_buffer={algorithm.overlong_buffer}: must be from 0 to "
            f"rollout.max_tokens={longest}."
        )


def _check_on_policy_sampling(config: Config) -> None:
    """Refuse sampling settings that make samples off-policy for the loss; users' programs are not
    checked."""
    algorithm, rollout = config.algorithm, config.rollout
    if not _is_built_in(config) or "algorithm.policy_loss" not in _uses(config):
        return  # it learns from samples whoever wrote them, or as it likes
    if not is_off_policy(config) or resolve_correction(config) != "none":
        return
    if not uses_policy_ratio(algorithm.policy_loss):
        flow = config.placement
        found = {
            "placement.staleness": flow.staleness,
            "placement.in_flight": flow.in_flight,
            "algorithm.replay_share": algorithm.replay_share,
            "rollout.partial": rollout.partial,
            "rollout.weight_sync": rollout.weight_sync,
        }
        name = next(name for name, value in found.items() if value)
        raise ConfigError(
            f"{name}={found[name]} learns from samples of another policy, and "
            f"algorithm.policy_loss={algorithm.policy_loss} takes them for the policy's own. Set "
            "algorithm.correction=truncate, or a loss with a ratio: "
            "algorithm.policy_loss=ppo_clip."
        )
