"""The placement strategies, by the name that `placement=` takes, and the settings of a role's place
that they read, `placement.roles.<role>.devices` and `share`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from hybridrl.config.role_models import check_group_names
from hybridrl.config.schema import PlacementConfig
from hybridrl.errors import ConfigError
from hybridrl.layout.training_mesh import model_parallel_size
from hybridrl.placement.placement import (
    ACTOR_ROLE,
    GENERATOR_ROLE,
    Placement,
    RolePlace,
    RoleRequirements,
)
from hybridrl.system.cluster_spec import ClusterSpec


@dataclass(frozen=True)
class RolePlaceSettings:
    """The settings of a role's place, `placement.roles.<role>`."""

    devices: tuple[int, ...] | None = None
    share: float | None = None


def parse_role_settings(settings: PlacementConfig, role: str) -> RolePlaceSettings:
    """Parse the settings `placement.roles.<role>` of a role.

    Raises:
        ConfigError: for a name or a value that is none.
    """
    read = settings.roles.get(role) or {}
    name = f"placement.roles.{role}"
    if isinstance(read, dict) and "parallel" in read:
        raise ConfigError(
            f"There is no setting `{name}.parallel`: how a model is cut is said of the model. Set "
            f"models.{role}.parallel."
        )
    check_group_names(name, read, [f.name for f in fields(RolePlaceSettings)])
    devices, share = read.get("devices"), read.get("share")
    is_list = isinstance(devices, list | tuple) and all(isinstance(d, int) for d in devices)
    if devices is not None and not (is_list and devices):
        raise ConfigError(f"{name}.devices={devices}: must be a list of device numbers: [0, 1].")
    if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
        raise ConfigError(f"{name}.share={share}: must be in (0, 1].")
    return RolePlaceSettings(None if devices is None else tuple(devices), share)


def place_colocated(
    roles: Sequence[RoleRequirements], cluster: ClusterSpec, settings: PlacementConfig
) -> Placement:
    """Place each role on all devices, in their order (flattening): roles take turns, nothing
    overlaps, and every model is sharded over all devices."""
    everywhere = tuple(range(len(cluster.devices)))
    return Placement(
        "flattening", {role.name: RolePlace(everywhere, role.parallel) for role in roles}
    )


def place_interleaved(
    roles: Sequence[RoleRequirements], cluster: ClusterSpec, settings: PlacementConfig
) -> Placement:
    """Place roles that train on all devices, and roles that only score on complementary parts of
    them, so that reference and reward work at the same time, each gathered from fewer devices.
    Parts overlap only where shares sum to more than 1. Called Interleaving in "Adaptive Placement
    and Parallelism Framework for Accelerating RLHF Training" (arXiv:2312.11819)."""
    total = len(cluster.devices)
    scoring = [role for role in roles if not role.trains]
    found, start = {}, 0
    for role in roles:
        share = parse_role_settings(settings, role.name).share
        if share is None:
            share = 1.0 if role.trains else 1 / len(scoring)
        unit = model_parallel_size(role.parallel)
        count = min(total, max(unit, unit * round(share * total / unit)))
        devices = [(start + i) % total for i in range(count)]
        if count == total:
            devices = list(range(total))
        else:
            start += count
        found[role.name] = RolePlace(tuple(sorted(devices)), role.parallel)
    return Placement("interleaving", found)


def place_disaggregated(
    roles: Sequence[RoleRequirements], cluster: ClusterSpec, settings: PlacementConfig
) -> Placement:
    """Place roles that train on the first devices and generation, with weights of its own, on the
    last `generation_devices` (separation), so that the next samples can be generated while the last
    ones are learned. Roles that only score are placed on the side that `scoring` names.

    Raises:
        ConfigError: if one side would have no device, or nothing is generated.
    """
    total = len(cluster.devices)
    if total < 2:
        raise ConfigError(
            f"placement=separation needs a device that trains and one that generates, but there is "
            f"{total}. Set num_devices=2 or more, or placement=flattening."
        )
    actor = next((role for role in roles if role.name == ACTOR_ROLE), None)
    generating = settings.generation_devices
    if generating is None:
        generating = _choose_generation_device_count(total, actor)
    if not 1 <= generating < total:
        raise ConfigError(
            f"placement.generation_devices={generating}: of {total} devices, 1 to {total - 1} can "
            "generate."
        )
    training, generation = range(total - generating), range(total - generating, total)
    sides = {"training": training, "generation": generation}
    if settings.scoring not in sides:
        raise ConfigError(
            f"placement.scoring={settings.scoring}: must be `training` or `generation`."
        )
    if actor is None or actor.generation is None:
        raise ConfigError(
            "placement=separation gives generation its own devices, but this trainer generates "
            "nothing. Set placement=flattening."
        )
    found = {}
    for role in roles:
        side = training if role.trains else sides[settings.scoring]
        if len(side) % model_parallel_size(role.parallel):
            side = training  # which the actor fits on, and this model is cut alike
        found[role.name] = RolePlace(tuple(side), role.parallel)
        if role is actor:
            found[GENERATOR_ROLE] = RolePlace(tuple(generation), actor.generation)
    return Placement("separation", found)


def _choose_generation_device_count(total: int, actor: RoleRequirements | None) -> int:
    """Return about half of the devices, a number that the model can be cut over on both sides."""
    train = share = 1
    if actor is not None:
        train = model_parallel_size(actor.parallel)
        share = model_parallel_size(actor.generation) if actor.generation else 1
    fitting = [n for n in range(share, total, share) if (total - n) % train == 0]
    return min(fitting, key=lambda n: (abs(2 * n - total), n), default=total // 2)


def place_explicit(
    roles: Sequence[RoleRequirements], cluster: ClusterSpec, settings: PlacementConfig
) -> Placement:
    """Place roles on the devices of `placement.roles.<role>.devices`. A `generator` among them
    separates generation from the actor.

    Raises:
        ConfigError: if a role has no devices there.
    """
    wanted = list(roles)
    if GENERATOR_ROLE in settings.roles:
        parallel = next((r.generation for r in roles if r.name == ACTOR_ROLE), None)
        if parallel is not None:
            wanted.append(RoleRequirements(GENERATOR_ROLE, parallel=parallel))
    found = {}
    for role in wanted:
        devices = parse_role_settings(settings, role.name).devices
        if devices is None:
            raise ConfigError(
                f"placement=explicit does not say where `{role.name}` lives; set "
                f"placement.roles.{role.name}.devices=[0] or more of the {len(cluster.devices)} "
                "devices."
            )
        found[role.name] = RolePlace(devices, role.parallel)
    return Placement("explicit", found)


def place_from_file(
    roles: Sequence[RoleRequirements], cluster: ClusterSpec, settings: PlacementConfig
) -> Placement:
    """Load the placement of the JSON file at `placement.path`.

    Raises:
        ConfigError: if there is none.
    """
    if settings.path is None:
        raise ConfigError(
            "placement=file needs placement.path=<placement.json>, as every run leaves one."
        )
    return Placement.load(settings.path)
