"""Checks of where models are placed and how they are cut over devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hybridrl.checks.machine.device_checks import check_min_devices, devices_here
from hybridrl.checks.settings.role_checks import check_role_models
from hybridrl.config.role_models import parse_role_model
from hybridrl.config.schema import Config, ParallelConfig, RolloutParallelConfig
from hybridrl.errors import ConfigError, suggest_name
from hybridrl.layout.training_mesh import check_parallel_sizes
from hybridrl.placement import (
    ACTOR_ROLE,
    GENERATOR_ROLE,
    Placement,
    RolePlace,
    RoleRequirements,
    place_roles,
)
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.systems.low_bits.precision_checks import check_precision_plan
from hybridrl.systems.low_bits.precision_plan import find_precision_setting
from hybridrl.trainers import load_roles
from hybridrl.trainers.role_spec import RoleSpec, find_playing_role, validate_roles

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Model: TypeAlias = "Callable[[], PretrainedConfig]"
_Roles = Mapping[str, RoleSpec] | Sequence[str]


def resolve_placement(
    config: Config,
    cluster: ClusterSpec,
    roles: _Roles | None = None,
    chosen: Placement | None = None,
) -> Placement:
    """Return the placement of these roles on the cluster (None: the trainer's roles), with every
    cut checked.

    Args:
        chosen: A placement to be checked; None: as the settings say.

    Raises:
        ConfigError: naming the setting and what would fit.
    """
    check_min_devices(config, len(cluster.devices))
    specs = resolve_roles(config, roles)
    for name in config.placement.roles:
        if name not in (*specs, GENERATOR_ROLE):
            raise ConfigError(
                f"placement.roles.{name} is set, but the job has no role `{name}`; it has "
                f"{', '.join(specs)}.{suggest_name(name, specs)}"
            )
    _check_generating_role(config, specs)
    placed = list_placed_roles(config, specs)
    placement = place_roles(placed, cluster, config.placement, chosen)
    _check_weight_flow(config, placement)
    for name, where in placement.roles.items():
        role = next((role for role in placed if role.name == name), None)
        moved = name == ACTOR_ROLE and placement.is_separated  # its generation
        generates = role is not None and role.generation is not None and not moved
        setting = _find_cut_setting(config, name)
        generation = config.rollout.parallel if generates else RolloutParallelConfig()
        check_parallel_sizes(
            len(where.devices),
            where.parallel,
            generation.ranks,
            setting,
            f"rollout.parallel.{'pp' if generation.pp > 1 else 'tp'}",
        )
        tp = where.parallel.tp if name == GENERATOR_ROLE else generation.tp
        _check_generating_ranks(cluster, name, where.devices, tp)
        if name != GENERATOR_ROLE:
            _check_model(config, cluster.kind, name, specs.get(name), where, setting)
    return placement


def _check_generating_ranks(
    cluster: ClusterSpec, role: str, devices: Sequence[int], tp: int
) -> None:
    """Refuse ranks that would generate together on several nodes."""
    for start in range(0, len(devices), tp):
        nodes = cluster.nodes_of(devices[start : start + tp])
        if len(nodes) > 1:
            raise ConfigError(
                f"rollout.parallel.tp={tp}: ranks {start} to {start + tp - 1} of `{role}` would "
                f"generate together, but are on different nodes ({', '.join(nodes)}). Set "
                "rollout.parallel.tp to a divisor of the number of devices that the role has on "
                "each node."
            )


def check_devices(config: Config, roles: Mapping[str, RoleSpec] | None = None) -> None:
    """Look at the folders of models, and place the roles on the devices of this machine. A
    cluster's are counted when it has been joined."""
    check_role_models(config, load_roles(config) if roles is None else roles)
    if config.ray.address is None and "RAY_ADDRESS" not in os.environ:
        resolve_placement(config, devices_here(config))


def resolve_roles(config: Config, roles: _Roles | None) -> dict[str, RoleSpec]:
    """Return the specs of the named roles: the trainer's own, else standard ones; None: all of the
    trainer's."""
    known = load_roles(config)
    if roles is None:
        return known
    if isinstance(roles, Mapping):
        return validate_roles(roles, "Job(roles=...)")
    return {
        name: known[name] if name in known else validate_roles([name], "Job(roles=...)")[name]
        for name in roles
    }


def _check_generating_role(config: Config, roles: Mapping[str, RoleSpec]) -> None:
    """Refuse a separate generator without the role that generates, which `Job(roles=...)` can leave
    out."""
    generates = any(spec.generates for spec in load_roles(config).values())
    if config.placement.strategy == "separation" and generates and ACTOR_ROLE not in roles:
        raise ConfigError(
            "placement=separation gives generation its own devices, but it is the role `actor` "
            f"that generates there, and the job's roles are only {', '.join(roles)}. Add `actor` "
            "to Job(roles=[...]), or set placement=flattening."
        )


def list_placed_roles(config: Config, roles: Mapping[str, RoleSpec]) -> list[RoleRequirements]:
    """List the roles that need devices, with their cuts and whether they train."""
    generation = ParallelConfig(tp=config.rollout.parallel.tp, pp=config.rollout.parallel.pp)
    players = dict.fromkeys(find_playing_role(roles, name, config) for name in roles)
    return [
        RoleRequirements(
            name,
            trains=bool(roles[name].trains),
            parallel=_resolve_parallel(config, name, roles[name]),
            generation=generation if roles[name].generates else None,
        )
        for name in players
    ]


def check_model_cut(parallel: ParallelConfig, model: PretrainedConfig, path: str) -> None:
    """Refuse cuts that the model's heads or layers do not allow."""
    from hybridrl.parallel import pipeline_schedule as stages
    from hybridrl.parallel import tensor_parallel as tensor
    from hybridrl.parallel import ulysses

    tensor.check_tensor_parallel_heads(model, parallel.tp, path)
    text = model.get_text_config()
    heads = text.num_attention_heads
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    ulysses.check_ulysses_heads(
        heads // parallel.tp, max(1, key_value_heads // parallel.tp), parallel.ulysses
    )
    stages.check_stages(text.num_hidden_layers, parallel.pp, parallel.chunks, "actor.parallel.pp")


def _check_model(
    config: Config, kind: str, role: str, spec: RoleSpec | None, where: RolePlace, setting: str
) -> None:
    """Refuse what the model of a role does not allow. What one in a hub is, workers learn."""
    path = (spec.path(role, config) if spec is not None else None) or config.model.path
    who, parallel, lora = path or "the tiny model", where.parallel, config.actor.lora.rank
    if spec is not None and spec.trains and lora and (parallel.tp > 1 or parallel.pp > 1):
        raise ConfigError(
            f"actor.lora.rank={lora}: adapters are not cut over devices. Set {setting}.tp=1 and "
            f"{setting}.pp=1, or actor.lora.rank=null."
        )

    @cache
    def model() -> PretrainedConfig:  # of which many jobs ask nothing
        from hybridrl.models.model_loading import load_model_config, make_tiny_config

        return (
            make_tiny_config(**asdict(config.model.tiny))
            if path is None
            else load_model_config(path)
        )

    is_folder = path is not None and Path(path).expanduser().is_dir()
    is_known = path is None or is_folder
    if max(parallel.tp, parallel.pp, parallel.ulysses, parallel.ring) > 1:
        check_model_cut(parallel, model(), who)
    if role == ACTOR_ROLE:
        _check_quantization(config, kind, model if is_known else None, who)
    if role == ACTOR_ROLE and is_known:
        _check_routers(config, model, who)
        _check_pipeline_stages(config, model, who)
    if spec is not None and spec.generates and is_folder and config.rollout.engine == "vllm":
        _check_served(config, kind, model(), who)
    if spec is not None and spec.has_model(role, config):
        if find_precision_setting(config, role) is not None:
            known = model() if is_known else None
            check_precision_plan(config, role, spec, parallel, len(where.devices), known)
        if is_folder:
            from hybridrl.models.packing_trial import resolve_sample_layout
            from hybridrl.parallel.sequence_parallel import check_rows_divisible

            rows = resolve_sample_layout(model(), who, scalar=bool(spec.scalar))
            check_rows_divisible(rows, parallel.ring * parallel.ulysses)


def _check_routers(config: Config, model: Model, who: str) -> None:
    weight, replays = config.actor.router_loss_weight, config.rollout.routing_replay
    wanted = {f"actor.router_loss_weight={weight}": weight, "rollout.routing_replay=true": replays}
    for setting in (setting for setting, is_set in wanted.items() if is_set):
        from hybridrl.models.expert_routing import check_routers

        check_routers(model(), setting, who)


def _check_quantization(config: Config, kind: str, model: Model | None, who: str) -> None:
    """Refuse a generator precision that devices or layers do not support; vLLM checks GPU
    kernels."""
    quantization, dtype = config.rollout.quantization, config.model.dtype
    if kind == "cpu" and config.rollout.kv_cache != "auto":
        raise ConfigError(
            f"rollout.kv_cache={config.rollout.kv_cache}: the job's devices are CPUs, whose cache "
            "is in model.dtype. Set rollout.kv_cache=auto."
        )
    if quantization == "none":
        return
    setting = f"rollout.quantization={quantization}"
    if quantization == "fp8" and kind == "cpu":
        raise ConfigError(
            f"{setting}: the job's devices are CPUs, which multiply in 8 bits as int8 only. Set "
            "rollout.quantization=int8, or none."
        )
    if kind != "cpu" and dtype == "float32":
        raise ConfigError(
            f"{setting} with model.dtype=float32: on GPUs what linear layers of 8 bits give is in "
            "16. Set model.dtype=bfloat16, or rollout.quantization=none."
        )
    if model is not None:
        from hybridrl.quantization.low_bit_linear import check_linear_layers

        check_linear_layers(model(), setting, who)


def _check_served(config: Config, kind: str, model: Any, who: str) -> None:
    """Refuse a model that vLLM cannot generate with."""
    from hybridrl.models.language_model import class_of
    from hybridrl.rollout.vllm_options import check_served

    def runs_in_vllm() -> bool:  # by vLLM's own back end for transformers' classes
        found: Any = class_of(model)
        return found is not None and bool(found.is_backend_compatible())

    check_served(model, who, kind, config.model.dtype, is_known=runs_in_vllm)


def _check_pipeline_stages(config: Config, model: Model, who: str) -> None:
    rollout = config.rollout
    if rollout.engine != "pipeline":
        return
    from hybridrl.systems.unequal_generation.decoder_stage import check_decoder_stages
    from hybridrl.systems.unequal_generation.generation_plan import (
        load_generation_plan,
        make_equal_plan,
    )

    layers = model().get_text_config().num_hidden_layers
    if rollout.plan is None:
        make_equal_plan(layers, rollout.parallel.pp)
    elif (plan := load_generation_plan(rollout.plan)).layers != layers:
        raise ConfigError(
            f"rollout.plan={rollout.plan} is for a model of {plan.layers} layers, and {who} has "
            f"{layers}. Make the plan again: hybridrl plan generation model.path={who}."
        )
    check_decoder_stages(model(), "rollout=pipeline", who)


def _check_weight_flow(config: Config, placement: Placement) -> None:
    settings = config.placement
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
    if placement.is_separated or settings.strategy == "auto":  # which may choose to be
        return
    for name in ("staleness", "in_flight", "generation_devices"):
        if value := getattr(settings, name):
            raise ConfigError(
                f"placement.{name}={value} needs generation on devices of its own: set "
                "placement=separation."
            )


def _find_cut_setting(config: Config, role: str) -> str:
    """Return the setting that determines how a role is cut."""
    if role == GENERATOR_ROLE:
        return "rollout.parallel"
    own = parse_role_model(config, role).parallel is not None
    return f"models.{role}.parallel" if own else "actor.parallel"


def _resolve_parallel(config: Config, role: str, spec: RoleSpec) -> ParallelConfig:
    """Return how a role's model is cut; `dp` and `shards` apply to the actor only, because other
    roles may have fewer devices."""
    if (own := parse_role_model(config, role).parallel) is not None:
        return own
    if not spec.has_model(role, config):
        return ParallelConfig()  # functions and judges are not cut
    parallel = config.actor.parallel
    return parallel if role == ACTOR_ROLE else replace(parallel, dp=None, shards=None)
