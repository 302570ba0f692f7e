"""Checks of training settings: updates, parallelism, optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hybridrl.algorithms import PolicyObjective
from hybridrl.config.model_schema import AUTO_SCHEDULE
from hybridrl.config.role_models import list_parallel_settings, parse_role_model
from hybridrl.config.schema import Config, OptimizerConfig
from hybridrl.errors import ConfigError
from hybridrl.models.optimizer_states import (
    ELEMENTWISE,
    OPTIONS,
    load_user_optimizer,
    probe_user_optimizer,
    read_options,
)
from hybridrl.placement import Placement
from hybridrl.trainers import load_trainer
from hybridrl.trainers.role_spec import ACTOR_ROLE, RoleSpec

_MAX_BFLOAT16_BETA = 0.99
"""Largest beta of moments in bfloat16, which has 8 bits: a change of 0.4% may be lost."""

_MIN_SEARCHED_STEPS = 40
"""Of a run whose learning rate is searched."""
_ENCODING_PURPOSES = (
    ("gradients", "gradients", "sums over ranks that share parameters"),
    ("weights", "new weights", "weights that ranks share"),
)
"""Of a setting that may do nothing: its name, what who does not learn lacks, what it is of."""


def _check_updates(config: Config) -> None:
    prompts, share = config.data.prompts_per_step, config.rollout.partial
    counted = "data.prompts_per_step x rollout.samples_per_prompt"
    if share is not None:  # the first step has no more, and none may have an update of nothing
        prompts, counted = math.ceil(share * prompts * (1 - 1e-9)), f"rollout.partial x {counted}"
    samples = prompts * config.rollout.samples_per_prompt
    if config.actor.updates_per_step > samples:
        raise ConfigError(
            f"actor.updates_per_step={config.actor.updates_per_step} is more than the {samples} "
            f"samples of a step ({counted})."
        )


def _check_max_kl(config: Config) -> None:
    name, most = config.trainer.name, config.actor.max_kl
    if most is None:
        return
    if config.algorithm.replay_share:
        raise ConfigError(
            f"actor.max_kl={most} measures from where a step began, and replayed samples "
            f"(algorithm.replay_share={config.algorithm.replay_share}) come from earlier steps. "
            "Leave one of them out."
        )
    if not isinstance(load_trainer(name).objective(config), PolicyObjective):
        raise ConfigError(
            f"actor.max_kl={most}: the loss of trainer.name={name} is its own "
            "(Trainer.objective), which does not measure that KL. Leave it out."
        )


def _check_shared_prompts(config: Config) -> None:
    if config.actor.share_prefixes == "true" and config.rollout.routing_replay:
        raise ConfigError(
            "actor.share_prefixes=true: with rollout.routing_replay=true each sample repeats the "
            "choices of experts for its own prompt, so samples cannot share one. Set "
            "actor.share_prefixes=auto."
        )


def _check_experts(config: Config) -> None:
    if config.model.tiny.experts == 1:
        raise ConfigError(
            "model.tiny.experts=1: two experts take a token, so there must be 2 or more; 0 makes "
            "layers without any."
        )


def _list_optimizers(config: Config) -> dict[str, OptimizerConfig]:
    """Return the optimizer settings of the actor and of each role that has its own, by the setting
    that holds them."""
    actor = config.actor.optimizer
    others = {f"models.{r}": parse_role_model(config, r).optimizer_of(actor) for r in config.models}
    return {f"{name}.optimizer": one for name, one in {"actor": actor, **others}.items()}


def _check_moments(config: Config) -> None:
    for name, optimizer in _list_optimizers(config).items():
        slowest = max(optimizer.betas, default=0.0)
        if optimizer.moments == "bfloat16" and slowest > _MAX_BFLOAT16_BETA:
            raise ConfigError(
                f"{name}.moments=bfloat16: with {name}.betas={optimizer.betas} a step changes "
                f"a moment by {1 - slowest:.2g} of it or less, which bfloat16 rounds away. Set "
                f"betas of {_MAX_BFLOAT16_BETA} or less, or {name}.moments=float32."
            )


def _check_optimizers(config: Config) -> None:
    cuts = list_parallel_settings(config)
    for name, optimizer in _list_optimizers(config).items():
        said = f"{name}.name={optimizer.name}"
        if optimizer.moments != "float32" and optimizer.name not in ("adamw", "muon"):
            raise ConfigError(
                f"{name}.moments={optimizer.moments} is of the moments of adamw and muon, and "
                f"{said} keeps others. Leave {name}.moments out."
            )
        if optimizer.betas != OptimizerConfig().betas and optimizer.name not in ("adamw", "muon"):
            raise ConfigError(
                f"{name}.betas={optimizer.betas} is of adamw and muon, and {said} has none. Leave "
                f"{name}.betas out; a class of yours gets what is in {name}.options."
            )
        if optimizer.name in OPTIONS:
            read_options(optimizer, name)
            continue
        is_elementwise = getattr(load_user_optimizer(optimizer, name), ELEMENTWISE, False)
        for ndim in (1, 2):
            probe_user_optimizer(optimizer, ndim, name)
        owner = name.removesuffix(".optimizer")
        owner = owner if owner in cuts else "actor"
        if not is_elementwise and cuts[owner].tp > 1:
            raise ConfigError(
                f"{said} gets parts of matrices with {owner}.parallel.tp={cuts[owner].tp}. If its "
                "step of an element depends on that element alone, say so in the class, "
                f"`{ELEMENTWISE} = True`; otherwise set {owner}.parallel.tp=1."
            )


def _check_weights(config: Config) -> None:
    actor = config.actor
    for name, cut in list_parallel_settings(config).items():
        setting = f"{name}.parallel.weights"
        if cut.weights == "full":
            continue
        if actor.lora.rank is not None:
            raise ConfigError(
                f"{setting}={cut.weights} gains nothing with adapters (actor.lora.rank="
                f"{actor.lora.rank}), for which most weights never change. Leave it out."
            )
        if actor.offload_between_calls:
            raise ConfigError(
                f"{setting}={cut.weights} keeps a copy of the weights on every device, and "
                "actor.offload_between_calls gives that memory to others. Leave one of them out."
            )


def _check_chunks(config: Config) -> None:
    for name, cut in list_parallel_settings(config).items():
        if cut.chunks > 1 and cut.pp == 1:
            raise ConfigError(
                f"{name}.parallel.chunks={cut.chunks}: these are stages of a pipeline, and "
                f"there is none. Set {name}.parallel.pp=2 or more, or {name}.parallel.chunks=1."
            )


def find_ineffective_encodings(
    config: Config, roles: Mapping[str, RoleSpec], placement: Placement
) -> list[str]:
    """Return a sentence for each `parallel.gradients` and `parallel.weights` without effect,
    because the role does not train or has no rank to share with."""
    found = []
    for role, place in placement.roles.items():
        own = role in config.models and parse_role_model(config, role).parallel is not None
        if not (own or role == ACTOR_ROLE) or role not in roles:
            continue
        name = ACTOR_ROLE if role == ACTOR_ROLE else f"models.{role}"
        ranks = len(place.devices) // (place.parallel.tp * place.parallel.pp)
        for what, lacking, purpose in _ENCODING_PURPOSES:
            if (value := getattr(place.parallel, what)) == "full":
                continue
            setting = f"{name}.parallel.{what}={value} does nothing in this job"
            if not roles[role].trains:
                found.append(f"{setting}: `{role}` does not learn, so it has no {lacking}.")
            elif (place.parallel.shards or ranks) == 1:
                found.append(
                    f"{setting}: it is of {purpose}, and one rank of `{role}` has all that there "
                    "are to share."
                )
    return found


def _check_ring(config: Config) -> None:
    """Refuse checkpointing by operation with ring attention: gradients were wrong, probably because
    ring attention changes in place what is kept."""
    if (kept := config.actor.gradient_checkpointing) not in ("selective", "block"):
        return
    for name, cut in list_parallel_settings(config).items():
        if cut.ring > 1:
            raise ConfigError(
                f"actor.gradient_checkpointing={kept} does not go with {name}.parallel.ring="
                f"{cut.ring}. Set actor.gradient_checkpointing=full, or cut samples with "
                f"{name}.parallel.ulysses."
            )


def _check_rate_search(config: Config) -> None:
    setting, optimizer = f"actor.optimizer.schedule={AUTO_SCHEDULE}", config.actor.optimizer
    for name, one in _list_optimizers(config).items():
        if (one.schedule == AUTO_SCHEDULE) != (optimizer.schedule == AUTO_SCHEDULE):
            raise ConfigError(
                f"{name}.schedule={one.schedule} with actor.optimizer.schedule="
                f"{optimizer.schedule}: all models of a job search their learning rates, or none "
                f"does. Leave {name}.schedule out."
            )
    if optimizer.schedule != AUTO_SCHEDULE:
        return
    if load_trainer(config.trainer.name).DATA == "prompts":
        raise ConfigError(
            f"{setting} compares losses of the same data, and trainer.name={config.trainer.name} "
            "learns from samples that its policy draws. Set actor.optimizer.schedule=constant and "
            "actor.optimizer.learning_rate."
        )
    if config.meta is not None:
        raise ConfigError(
            f"{setting} goes back to the start of a stage, and algorithm=meta_reward_model also "
            "learns a table of tasks, which stays. Set actor.optimizer.schedule=constant and "
            "actor.optimizer.learning_rate."
        )
    lowest, highest = optimizer.learning_rate_range
    if not lowest < highest:
        raise ConfigError(
            f"actor.optimizer.learning_rate_range={optimizer.learning_rate_range}: must be the "
            "lowest and the highest rate to try, the lower one first."
        )
    if config.trainer.steps < _MIN_SEARCHED_STEPS:
        raise ConfigError(
            f"trainer.steps={config.trainer.steps} with {setting}: the search and a stage at what "
            f"it finds take {_MIN_SEARCHED_STEPS} steps or more. Set trainer.steps to that, or "
            "actor.optimizer.schedule=constant."
        )
    if config.checkpoint.memory_copies:
        raise ConfigError(
            f"checkpoint.memory_copies={config.checkpoint.memory_copies} with {setting}: copies "
            "lack the start of the stage, to which the search goes back. Leave one of them out."
        )


TRAINING_CHECKS = (
    *(_check_updates, _check_max_kl, _check_experts, _check_chunks, _check_ring, _check_moments),
    *(_check_shared_prompts, _check_weights, _check_optimizers, _check_rate_search),
)
