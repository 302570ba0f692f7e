"""What can be wrong with where models live and how they are cut over devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from hybridrl.config.schema import Config, ParallelConfig
from hybridrl.core.cluster import Cluster
from hybridrl.core.training_mesh import check_sizes
from hybridrl.errors import ConfigError
from hybridrl.placement import GENERATOR, Placement, Role, place, settings_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LEARNERS = ("actor", "critic", "cost_critic", "reward_model")
"""The roles whose models are trained; others only score."""


def check_placement(
    config: Config, cluster: Cluster, names: Sequence[str] | None = None
) -> Placement:
    """Where these roles (None: those of the trainer) live on the cluster, all models cut as their
    places say.

    Raises:
        ConfigError: naming the setting and what would fit.
    """
    roles = roles_of(config, names)
    _check_generates(config, roles)
    placement = place(roles, cluster, config.placement)
    _check_flow(config, placement)
    for name, where in placement.roles.items():
        role = next((role for role in roles if role.name == name), None)
        generates = role is not None and role.generation is not None
        rollout_tp = role.generation.tp if generates and not placement.is_separated else 1
        setting = _setting(config, name)
        check_sizes(len(where.devices), where.parallel, rollout_tp, setting)
        if name != GENERATOR:
            _check_cut(config, where.parallel, setting)
    return placement


def _check_generates(config: Config, roles: Sequence[Role]) -> None:
    """A job may be built with roles of a person's choice, the one that generates left out."""
    from hybridrl.trainers import load_trainer

    chosen = [role.name for role in roles]
    if (
        config.placement.strategy == "separation"
        and load_trainer(config.trainer.name).GENERATES
        and "actor" not in chosen
    ):
        raise ConfigError(
            "placement=separation gives generation its own devices, but it is the actor that "
            f"generates, and the job's roles are only {', '.join(chosen)}. Add `actor` to "
            "Job(roles=[...]), or set placement=flattening."
        )


def roles_of(config: Config, names: Sequence[str] | None = None) -> list[Role]:
    """What a placement has to know of these roles; None: those of the trainer."""
    from hybridrl.trainers import load_trainer

    trainer = load_trainer(config.trainer.name)
    names = list(names or trainer.roles(config))
    generation = ParallelConfig(tp=config.rollout.parallel.tp) if trainer.GENERATES else None
    return [
        Role(
            name,
            trains=name in LEARNERS,
            parallel=_parallel(config, name),
            generation=generation if name == "actor" else None,
        )
        for name in dict.fromkeys(played_by(name, config) for name in names)
    ]


def played_by(role: str, config: Config) -> str:
    """The role whose workers play this one: with LoRA the actor is its own reference."""
    return "actor" if role == "reference" and config.actor.lora.rank else role


def check_model_fits(parallel: ParallelConfig, model: PretrainedConfig, path: str) -> None:
    """Refuses cuts that the model's heads or layers do not allow."""
    from hybridrl.parallel import stages, tensor, ulysses

    tensor.check_heads(model, parallel.tp, path)
    text = model.get_text_config()
    heads = text.num_attention_heads
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    ulysses.check_heads(
        heads // parallel.tp, max(1, key_value_heads // parallel.tp), parallel.ulysses
    )
    stages.check_stages(text.num_hidden_layers, parallel.pp, parallel.chunks, "actor.parallel.pp")


def _check_cut(config: Config, parallel: ParallelConfig, setting: str) -> None:
    if config.actor.lora.rank and (parallel.tp > 1 or parallel.pp > 1):
        raise ConfigError(
            f"actor.lora.rank={config.actor.lora.rank}: adapters are not cut over devices. Set "
            f"{setting}.tp=1 and {setting}.pp=1, or actor.lora.rank=null."
        )
    if max(parallel.tp, parallel.pp, parallel.ulysses, parallel.ring) > 1:
        from hybridrl.models import load_config

        path = config.model.path
        model = load_config(path) if path else _tiny(config)
        check_model_fits(parallel, model, path or "the tiny model")


def _check_flow(config: Config, placement: Placement) -> None:
    settings = config.placement
    if settings.staleness < 0:
        raise ConfigError(f"placement.staleness={settings.staleness}: must be 0 or more.")
    if settings.transport not in ("auto", "collective", "store"):
        raise ConfigError(
            f"placement.transport={settings.transport}: must be one of auto, collective, store."
        )
    if settings.transport == "collective" and settings.staleness > 1:
        raise ConfigError(
            f"placement.transport=collective with placement.staleness={settings.staleness}: "
            "weights that old have left the trainer when they are wanted. Set "
            "placement.transport=store."
        )
    if settings.in_flight and (settings.staleness == 0 or settings.transport == "store"):
        raise ConfigError(
            "placement.in_flight=true means that samples under way go on with newer weights: set "
            "placement.staleness=1 and leave placement.transport=auto."
        )
    if placement.is_separated:
        return
    for name in ("staleness", "in_flight"):
        if value := getattr(settings, name):
            raise ConfigError(
                f"placement.{name}={value} needs generation on devices of its own: set "
                "placement=separation."
            )


def _setting(config: Config, role: str) -> str:
    """The setting that says how a role is cut."""
    if role == GENERATOR:
        return "rollout.parallel"
    own = settings_of(config.placement, role).parallel is not None
    return f"placement.roles.{role}.parallel" if own else "actor.parallel"


def _parallel(config: Config, role: str) -> ParallelConfig:
    """How a role's model is to be cut; `dp` is the actor's only, for others may have fewer
    devices."""
    if (own := settings_of(config.placement, role).parallel) is not None:
        return own
    if role in ("reward", "cost") and not getattr(config, role).model:
        return ParallelConfig()  # functions and judges are not cut
    parallel = config.actor.parallel
    return parallel if role == "actor" else replace(parallel, dp=None, shards=None)


def _tiny(config: Config) -> PretrainedConfig:
    from hybridrl.models import tiny_config

    return tiny_config(**asdict(config.model.tiny))
