"""Explicit: a table, in the settings or in a file, says where each role lives."""

from __future__ import annotations

from collections.abc import Sequence

from hybridrl.config.schema import PlacementConfig
from hybridrl.errors import ConfigError
from hybridrl.placement.placement import ACTOR, GENERATOR, Placement, Role, RolePlace
from hybridrl.placement.role_settings import settings_of
from hybridrl.system.cluster_spec import Cluster


def place(roles: Sequence[Role], cluster: Cluster, settings: PlacementConfig) -> Placement:
    """Place roles on the devices of `placement.roles.<role>.devices`. A `generator` among them
    separates generation from the actor.

    Raises:
        ConfigError: if a role has no devices there.
    """
    wanted = list(roles)
    if GENERATOR in settings.roles:
        parallel = next((r.generation for r in roles if r.name == ACTOR), None)
        if parallel is not None:
            wanted.append(Role(GENERATOR, parallel=parallel))
    found = {}
    for role in wanted:
        devices = settings_of(settings, role.name).devices
        if devices is None:
            raise ConfigError(
                f"placement=explicit does not say where `{role.name}` lives; set "
                f"placement.roles.{role.name}.devices=[0] or more of the {len(cluster.devices)} "
                "devices."
            )
        found[role.name] = RolePlace(devices, role.parallel)
    return Placement("explicit", found)


def place_from_file(
    roles: Sequence[Role], cluster: Cluster, settings: PlacementConfig
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
