"""Placement: a strategy gives each role its devices, in rank order, and its parallel layout.

A strategy is a function `place_roles(roles, cluster, settings) -> Placement`. A user's own stands
in a file: `placement.strategy=path/to/file.py:place`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

from hybridrl.config.schema import PlacementConfig
from hybridrl.errors import ConfigError, HybridRLError
from hybridrl.placement import strategies
from hybridrl.placement.placement import (
    ACTOR_ROLE,
    GENERATOR_ROLE,
    Placement,
    RolePlace,
    RoleRequirements,
)
from hybridrl.placement.strategies import RolePlaceSettings, parse_role_settings
from hybridrl.system import user_code
from hybridrl.system.cluster_spec import ClusterSpec

__all__ = [
    "ACTOR_ROLE",
    "GENERATOR_ROLE",
    "STRATEGIES",
    "Placement",
    "PlacementStrategy",
    "RolePlace",
    "RolePlaceSettings",
    "RoleRequirements",
    "parse_role_settings",
    "place_roles",
]

PlacementStrategy = Callable[[Sequence[RoleRequirements], ClusterSpec, PlacementConfig], Placement]

STRATEGIES: dict[str, PlacementStrategy] = {
    "flattening": strategies.place_colocated,
    "interleaving": strategies.place_interleaved,
    "separation": strategies.place_disaggregated,
    "explicit": strategies.place_explicit,
    "file": strategies.place_from_file,
    "auto": strategies.place_colocated,
}
"""By the name that `placement=` takes. `auto` is flattening until devices and models are known and
the planner has chosen (`hybridrl.planner.search.proposals`)."""


def place_roles(
    roles: Sequence[RoleRequirements],
    cluster: ClusterSpec,
    settings: PlacementConfig,
    chosen: Placement | None = None,
) -> Placement:
    """Return the placement that the settings ask for, or the chosen one, after checking it.

    Raises:
        ConfigError: for an unknown strategy, or a placement that does not fit roles and devices.
    """
    for name in settings.roles:
        parse_role_settings(settings, name)
    strategy = user_code.resolve_user_object("placement.strategy", settings.strategy, STRATEGIES)
    if chosen is not None:
        placement = chosen
    elif settings.strategy in STRATEGIES:
        placement = strategy(roles, cluster, settings)
    else:
        placement = _place_by_user_function(strategy, roles, cluster, settings)
    _check_placement(placement, roles, len(cluster.devices))
    return placement


def _place_by_user_function(
    strategy: PlacementStrategy,
    roles: Sequence[RoleRequirements],
    cluster: ClusterSpec,
    settings: PlacementConfig,
) -> Placement:
    """Call a strategy of the user's, and check what it returns."""
    setting = f"placement.strategy={settings.strategy}"
    try:
        found = strategy(roles, cluster, settings)
    except HybridRLError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{setting}: called with (roles, cluster, settings) it failed.\n"
            f"{''.join(traceback.format_exception(error)).rstrip()}"
        ) from error
    if not isinstance(found, Placement):
        raise ConfigError(
            f"{setting} gave a {type(found).__name__}; it must return a hybridrl.placement."
            "Placement."
        )
    return found


def _check_placement(placement: Placement, roles: Sequence[RoleRequirements], devices: int) -> None:
    by = f"The placement `{placement.strategy}`"
    if placement.is_separated and ACTOR_ROLE in placement.co_residents(GENERATOR_ROLE):
        raise ConfigError(
            f"{by} puts `{GENERATOR_ROLE}` and `actor` on the same device. Give them different "
            f"ones, or leave `{GENERATOR_ROLE}` out: then the actor generates where it trains."
        )
    for role in roles:
        if role.name not in placement.roles:
            raise ConfigError(
                f"{by} says nothing of the role `{role.name}`; it places "
                f"{', '.join(placement.roles) or 'none'}."
            )
    for name, place in placement.roles.items():
        wrong = [d for d in place.devices if not 0 <= d < devices]
        if wrong or not place.devices:
            raise ConfigError(
                f"{by} puts `{name}` on devices {list(place.devices)}, but the {devices} devices "
                f"are numbered 0 to {devices - 1}. Mend it, or set num_devices."
            )
        if len(set(place.devices)) < len(place.devices):
            raise ConfigError(f"{by} names a device of `{name}` twice: {list(place.devices)}.")
