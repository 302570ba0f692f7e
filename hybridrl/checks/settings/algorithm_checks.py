"""Checks of settings that the chosen algorithm does not support."""

from __future__ import annotations

from hybridrl.algorithms.policy_objective import (
    find_policy_loss,
    list_loss_options,
    uses_policy_ratio,
)
from hybridrl.checks.settings.credit_checks import (
    check_advantages,
    check_separate_rewards,
    check_shaping,
    check_step_credit,
    check_turn_credit,
    find_uses,
    is_built_in,
)
from hybridrl.config.effective_settings import unread
from hybridrl.config.schema import FULL_FORMAT, Config, CostConfig, CriticConfig
from hybridrl.errors import ConfigError, ErrorCollector, suggest_name
from hybridrl.trainers import load_roles, load_trainer
from hybridrl.trainers.grpo import compute_max_replayed_prompts
from hybridrl.trainers.objectives import find_off_policy_setting, resolve_correction

_TASK_FUNCTION_PREFIX = "hybridrl.data.tasks."
"""Before the names of functions that built-in tasks bring; presets name them."""
_GROUPS_OF_TRAINERS = {
    "cost": "a cost belongs to Safe-RLHF and Safe-RLHF needs one. Use algorithm=safe_rlhf, which "
    "sets both.",
    "preference": "`preference` belongs to learning from preferences. Use algorithm=dpo, "
    "algorithm=online_dpo, algorithm=reward_model or algorithm=kto, which set both; a trainer of "
    "your own that reads it has it in its USES.",
    "meta": "`meta` belongs to reward models of many tasks. Use algorithm=meta_reward_model, which "
    "sets both.",
}
"""Groups of settings that are null with all other trainers, and what is to be said then."""
OF_PARTS = (
    "cost",
    "preference",
    "meta",
    "critic.value_clip",
    "critic.warmup_steps",
    "critic.epochs",
)
"""Settings of parts that a trainer has or has not, which `_check_program_groups` tells of."""


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
        _check_tasks,
        check_step_credit,
        check_shaping,
    ]
    if _learns_from_samples(config):
        checks += [
            check_advantages,
            check_turn_credit,
            check_separate_rewards,
            _check_kl,
            _check_loss,
            _check_on_policy_sampling,
        ]
    problems = ErrorCollector()
    for check in checks:
        with problems.noted():
            check(config)
    problems.raise_if_any()


def _check_unread(config: Config) -> None:
    """Refuse settings that the trainer does not read, whoever wrote it."""
    name = config.trainer.name
    reasons = load_trainer(name).UNREAD_REASONS
    own = "" if is_built_in(config) else f", or name it in the USES of {name} if that reads it"
    for setting, value, readers in unread(config, find_uses(config)):
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
    _refuse_unpaired(config, "cost", "cost" in kinds)
    learns_pairs = "preference" in find_uses(config)
    _refuse_unpaired(config, "preference", learns_pairs)
    if learns_pairs and is_built_in(config) and config.actor.updates_per_step > 1:
        raise ConfigError(
            f"actor.updates_per_step={config.actor.updates_per_step}: trainer.name={name} makes "
            "one update of each step's rows. Lower data.prompts_per_step for more updates."
        )
    if name == "kto" and config.data.prompts_per_step == 1:
        raise ConfigError(
            "data.prompts_per_step=1: trainer.name=kto measures how far the policy has moved by "
            "responses to other prompts of the step. Set it to 2 or more."
        )
    share, prompts = config.algorithm.replay_share, config.data.prompts_per_step
    if share and not compute_max_replayed_prompts(config):
        raise ConfigError(
            f"algorithm.replay_share={share} of a step with data.prompts_per_step={prompts} is "
            f"less than one prompt. Set it to {1 / (prompts + 1):.2g} or more, or leave it out."
        )
    age, beside = config.algorithm.replay_age, config.algorithm.ptx_coefficient > 0
    if share and age < (updates := config.actor.step_updates + beside):
        raise ConfigError(
            f"algorithm.replay_age={age}: a step makes {updates} updates, so that samples of the "
            f"step before are too old already. Set it to {updates} or more."
        )


def _refuse_unpaired(config: Config, group: str, is_read: bool) -> None:
    """Refuse a group of settings that the trainer does not read, and its lack where it does."""
    if (getattr(config, group) is not None) != is_read:
        raise ConfigError(
            f"trainer.name={config.trainer.name} with {group}={'null' if is_read else '...'}: "
            f"{_GROUPS_OF_TRAINERS[group]}"
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
    is_rounded = lora.base_format != FULL_FORMAT
    if is_rounded and lora.rank is None:
        raise ConfigError(
            f"actor.lora.base_format={lora.base_format} is for weights that stay as they are, and "
            "without adapters all are trained. Set actor.lora.rank, or leave it out."
        )
    why = "there are none (actor.lora.rank)" if lora.rank is None else "only vLLM takes them"
    if is_rounded:
        why = "vLLM reads a base that is not in actor.lora.base_format"
    if rollout.adapters == "separate" and (
        lora.rank is None or rollout.engine != "vllm" or is_rounded
    ):
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


def _check_tasks(config: Config) -> None:
    name, data = config.trainer.name, config.data
    _refuse_unpaired(config, "meta", "meta" in find_uses(config))
    if config.meta is None:
        return
    if data.task_column is None:
        raise ConfigError(
            f"data.task_column=null: trainer.name={name} adapts to tasks. Set it to the column "
            "with the annotator, domain or user of a pair."
        )
    if config.meta.task_pairs < 2:
        raise ConfigError("meta.task_pairs=1: a task is split into support and query pairs.")
    unread = {
        "data.sources": data.sources,
        "data.sampler": data.sampler,
        "data.shuffle=false": not data.shuffle,
        f"data.order={data.order}": data.order != "random",
        "actor.lora": config.actor.lora.rank,
        f"actor.updates_per_step={config.actor.updates_per_step}": (
            config.actor.updates_per_step > 1
        ),
    }
    for setting in (setting for setting, is_set in unread.items() if is_set):
        raise ConfigError(
            f"{setting}: trainer.name={name} deals whole tasks in an order of its own, makes one "
            "update of them, and trains all weights. Leave it out."
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
    bounds = {
        "truncate": [algorithm.correction_high],
        "mask": [algorithm.correction_low, algorithm.correction_high],
    }.get(correction, [])
    if bounds and bounds.count(None) == len(bounds):
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
    algorithm = config.algorithm
    if not is_built_in(config) or "algorithm.policy_loss" not in find_uses(config):
        return  # it learns from samples whoever wrote them, or as it likes
    setting = find_off_policy_setting(config)
    if not setting or resolve_correction(config) != "none":
        return
    if not uses_policy_ratio(algorithm.policy_loss):
        raise ConfigError(
            f"{setting} learns from samples of another policy, and with algorithm.correction=none "
            f"algorithm.policy_loss={algorithm.policy_loss} takes them for the policy's own. Leave "
            "algorithm.correction out, or set a loss with a ratio: algorithm.policy_loss=ppo_clip."
        )
