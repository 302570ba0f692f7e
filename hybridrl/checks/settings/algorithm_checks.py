"""Settings that make no sense together: an algorithm asked for what it does not have."""

from __future__ import annotations

from hybridrl.config.schema import Config, CostConfig, CriticConfig, is_served
from hybridrl.errors import ConfigError, check_all, nearest

OF_TASKS = "hybridrl.data.tasks."
"""Before the names of functions that built-in tasks bring; presets name them."""
WITH_PAIRS = ("dpo", "online_dpo", "reward_model")
SAMPLES_AS_DATA = ("online_dpo", "expert_iteration")
"""Programs that learn from samples whoever wrote them, not by how likely they were."""
WITH_STEPS = ("grpo", "ppo")
WITH_SHAPING = ("grpo", "ppo", "online_dpo")
ESTIMATORS_OF_STEPS = ("group_relative", "reinforce_plus_plus")
WITH_REWARD_PER_TOKEN = ("ppo", "safe_rlhf", "remax")


def check_algorithm(config: Config) -> None:
    """Refuses contradictions.

    Raises:
        ConfigError: names the settings and the cure.
    """
    checks = [_check_parts, _check_cost, _check_lora, _check_steps, _check_shaping]
    if _learns_from_samples(config):
        checks += [_check_advantages, _check_turns, _check_kl, _check_loss, _check_samples]
    check_all(checks, config)


def _is_own(trainer: str) -> bool:
    """Whether a driver program is the user's: what it makes of the settings is its own affair."""
    from hybridrl.trainers import PROGRAMS

    return trainer not in PROGRAMS


def _learns_from_samples(config: Config) -> bool:
    from hybridrl.trainers import load_roles, load_trainer

    generates = any(spec.generates for spec in load_roles(config).values())
    return bool(load_trainer(config.trainer.name).TRAINS and generates)


def _check_parts(config: Config) -> None:
    from hybridrl.trainers import load_roles
    from hybridrl.trainers.replay_buffer import most_replayed

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
    if (config.preference is not None) != (name in WITH_PAIRS) and not _is_own(name):
        raise ConfigError(
            f"trainer.name={name} with preference="
            f"{'null' if config.preference is None else '...'}: `preference` belongs to learning "
            "from pairs. Use algorithm=dpo, algorithm=online_dpo or algorithm=reward_model, which "
            "set both."
        )
    if name in WITH_PAIRS and config.actor.updates_per_step > 1:
        raise ConfigError(
            f"actor.updates_per_step={config.actor.updates_per_step}: trainer.name={name} makes "
            "one update of each step's pairs. Lower data.prompts_per_step for more updates."
        )
    if config.algorithm.dynamic_sampling and name != "grpo" and not _is_own(name):
        raise ConfigError(
            f"algorithm.dynamic_sampling=true compares the samples of a prompt, which "
            f"trainer.name={name} does not. Use algorithm=dapo, or leave it out."
        )
    if config.algorithm.replay_share and name != "grpo" and not _is_own(name):
        raise ConfigError(
            f"algorithm.replay_share={config.algorithm.replay_share}: only trainer.name=grpo, and "
            f"the algorithms that are settings of it, replay samples; trainer.name={name} does "
            "not. Leave it out."
        )
    share, prompts = config.algorithm.replay_share, config.data.prompts_per_step
    if share and not most_replayed(config):
        raise ConfigError(
            f"algorithm.replay_share={share} of a step with data.prompts_per_step={prompts} is "
            f"less than one prompt. Set it to {1 / (prompts + 1):.2g} or more, or leave it out."
        )


def _check_cost(config: Config) -> None:
    cost = config.cost
    if cost is None:
        return
    if config.data.task is None and str(cost.function).startswith(OF_TASKS):
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
    from hybridrl.algorithms.registry import ADVANTAGES, advantage_estimator, takes

    algorithm, name = config.algorithm, config.trainer.name
    per_prompt = config.rollout.samples_per_prompt
    estimator = advantage_estimator(algorithm.advantage)
    if _is_own(name):
        return
    if per_prompt == 1 and name == "online_dpo":
        raise ConfigError(
            "rollout.samples_per_prompt=1: trainer.name=online_dpo learns from the best and the "
            "worst sample of a prompt, so it needs at least 2."
        )
    if name != "grpo":
        if algorithm.advantage != "group_relative":
            raise ConfigError(
                f"algorithm.advantage={algorithm.advantage} is for trainer.name=grpo; "
                f"trainer.name={name} has its own way. Leave it out."
            )
        return
    if per_prompt == 1 and takes(estimator, "groups"):
        raise ConfigError(
            f"rollout.samples_per_prompt=1: algorithm.advantage={algorithm.advantage} compares the "
            "samples of one prompt with each other, so it needs at least 2."
        )
    if per_prompt == 1 and algorithm.dynamic_sampling:
        raise ConfigError(
            "algorithm.dynamic_sampling=true with rollout.samples_per_prompt=1: a single sample "
            "never differs from itself, so every prompt would be thrown away. Draw 2 or more."
        )
    if algorithm.advantage_scale != "std" and not takes(estimator, "scale"):
        scaled = [name for name, known in ADVANTAGES.items() if takes(known, "scale")]
        raise ConfigError(
            f"algorithm.advantage_scale={algorithm.advantage_scale}: "
            f"algorithm.advantage={algorithm.advantage} has no scale of its own; only "
            f"{' and '.join(scaled)} have. Leave it out."
        )


def _check_turns(config: Config) -> None:
    name, rollout = config.trainer.name, config.rollout
    if config.algorithm.turn_credit != "turn":
        return
    if rollout.episode is None and not is_served(rollout, config.environment):
        raise ConfigError(
            "algorithm.turn_credit=turn, but samples have one turn. Name what takes the others: "
            "rollout.episode or environment.name; or set algorithm.turn_credit=episode."
        )
    instead = {
        "remax": "the greedy response of ReMax has one score, and no turns to compare with",
        "distillation": "a student learns what a teacher thinks of tokens, and not from rewards",
    }
    if name in instead:
        raise ConfigError(
            f"algorithm.turn_credit=turn with trainer.name={name}: {instead[name]}. Use "
            "algorithm=grpo or algorithm=ppo, or set algorithm.turn_credit=episode."
        )


def _check_steps(config: Config) -> None:
    """Refuses rewards of steps where nothing reads them."""
    algorithm, name = config.algorithm, config.trainer.name
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
    if _is_own(name):
        return
    if name not in WITH_STEPS:
        raise ConfigError(
            f"algorithm.step_credit={algorithm.step_credit}: trainer.name={name} knows one score a "
            f"sample. Use algorithm=grpo or algorithm=ppo, or leave it out."
        )
    if name == "grpo" and algorithm.advantage not in ESTIMATORS_OF_STEPS:
        raise ConfigError(
            f"algorithm.step_credit={algorithm.step_credit}: algorithm.advantage="
            f"{algorithm.advantage} compares whole samples. Use one of "
            f"{', '.join(ESTIMATORS_OF_STEPS)}, or leave it out."
        )


def _check_shaping(config: Config) -> None:
    """Refuses to shape rewards where nothing shapes them."""
    reward, name = config.reward, config.trainer.name
    found = {"reward.shorter": reward.shorter, "reward.normalise_by": reward.normalise_by}
    for setting, value in found.items():
        if value and name not in WITH_SHAPING and not _is_own(name):
            raise ConfigError(
                f"{setting}={value}: trainer.name={name} learns from scores as they are. It is for "
                f"{', '.join(WITH_SHAPING)}; leave it out."
            )
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
    if reward.shorter and config.rollout.samples_per_prompt == 1 and name in WITH_SHAPING:
        raise ConfigError(
            f"reward.shorter={reward.shorter} compares the samples of a prompt, and "
            "rollout.samples_per_prompt=1. Draw 2 or more."
        )


def _check_kl(config: Config) -> None:
    algorithm, name = config.algorithm, config.trainer.name
    per_token = name in WITH_REWARD_PER_TOKEN or _is_own(name)
    if algorithm.kl_in_reward and not algorithm.kl_coefficient:
        raise ConfigError(
            "algorithm.kl_in_reward=true with algorithm.kl_coefficient=0: there is no KL to take "
            "off. Set algorithm.kl_coefficient."
        )
    if algorithm.kl_target is not None and not (algorithm.kl_in_reward and per_token):
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
    from hybridrl.algorithms.registry import options_of, policy_loss
    from hybridrl.trainers.objectives import correction_of

    algorithm, correction = config.algorithm, correction_of(config)
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
    options = options_of(policy_loss(algorithm.policy_loss))
    for option in algorithm.loss_options:
        if option not in options:
            raise ConfigError(
                f"algorithm.loss_options has `{option}`, which algorithm.policy_loss="
                f"{algorithm.policy_loss} does not take; it takes {', '.join(options) or 'none'}."
                f"{nearest(option, options)}"
            )
    longest = config.rollout.max_tokens
    if algorithm.overlong_buffer > longest:
        raise ConfigError(
            f"algorithm.overlong_buffer={algorithm.overlong_buffer}: must be from 0 to "
            f"rollout.max_tokens={longest}."
        )


def _check_samples(config: Config) -> None:
    """Refuses to learn from samples as if they came from the policy that is trained, if they do
    not. What a program of the user's learns from is its own affair."""
    from hybridrl.algorithms.registry import weighs_by_ratio

    algorithm, rollout = config.algorithm, config.rollout
    if _is_own(config.trainer.name) or config.trainer.name in SAMPLES_AS_DATA:
        return
    for name, value, whole in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0)):
        if value != whole:
            raise ConfigError(
                f"rollout.{name}={value} leaves tokens out when samples are drawn, and what is "
                "learned are the probabilities among all tokens: the two would not fit. Set "
                f"rollout.{name}={whole} for training; rollout.temperature fits."
            )
    if rollout.min_tokens and config.guard.most_mismatch is None:
        raise ConfigError(
            f"rollout.min_tokens={rollout.min_tokens} takes the end of a response out when samples "
            "are drawn, and what is learned are the probabilities among all tokens: the two would "
            "not fit. Set rollout.min_tokens=0 for training, and let the reward say that responses "
            "are too short; or, to measure speed, guard.most_mismatch to what may not fit."
        )
    from hybridrl.trainers.objectives import correction_of, is_off_policy

    if not is_off_policy(config) or correction_of(config) != "none":
        return
    if not weighs_by_ratio(algorithm.policy_loss):
        flow = config.placement
        found = {
            "placement.staleness": flow.staleness,
            "placement.in_flight": flow.in_flight,
            "algorithm.replay_share": algorithm.replay_share,
            "rollout.weight_sync": rollout.weight_sync,
        }
        name = next(name for name, value in found.items() if value)
        raise ConfigError(
            f"{name}={found[name]} learns from samples of another policy, and "
            f"algorithm.policy_loss={algorithm.policy_loss} takes them for the policy's own. Set "
            "algorithm.correction=truncate, or a loss with a ratio: "
            "algorithm.policy_loss=ppo_clip."
        )
