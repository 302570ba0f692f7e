"""Explicit: a table, in the settings or in a file, says where each role lives."""

from __future__ import annotations

from collections.abc import Sequence

from hybridrl.config.schema import PlacementConfig
from hybridrl.errors import ConfigError
from hybridrl.placement.placement import (
    ACTOR_ROLE,
    GENERATOR_ROLE,
    Placement,
    RolePlace,
    RoleRequirements,
)
from hybridrl.placement.role_settings import parse_role_settings
from hybridrl.system.cluster_spec import ClusterSpec


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
