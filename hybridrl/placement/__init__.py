"""Placement: a strategy gives each role its devices, in rank order, and its parallel layout.

A strategy is a function `place(roles, cluster, settings) -> Placement`. A user's own stands in a
file: `placement.strategy=path/to/file.py:place`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

from hybridrl.config.schema import PlacementConfig
from hybridrl.errors import ConfigError, HybridRLError
from hybridrl.placement import explicit, flattening, interleaving, separation
from hybridrl.placement.placement import ACTOR, GENERATOR, Placement, Role, RolePlace
from hybridrl.placement.role_settings import RoleSettings, settings_of
from hybridrl.system import user_code
from hybridrl.system.cluster_spec import Cluster

__all__ = [
    "ACTOR",
    "GENERATOR",
    "STRATEGIES",
    "Placement",
    "Role",
    "RolePlace",
    "RoleSettings",
    "Strategy",
    "place",
    "settings_of",
]

Strategy = Callable[[Sequence[Role], Cluster, PlacementConfig], Placement]

STRATEGIES: dict[str, Strategy] = {
    "flattening": flattening.place,
    "interleaving": interleaving.place,
    "separation": separation.place,
    "explicit": explicit.place,
    "file": explicit.place_from_file,
    "auto": flattening.place,
}
"""By the name that `placement=` takes. `auto` is flattening until devices and models are known and
the planner has chosen (`hybridrl.planner.search.proposals`)."""


def place(
    roles: Sequence[Role],
    cluster: Cluster,
    settings: PlacementConfig,
    chosen: Placement | None = None,
) -> Placement:
    """Return the placement that the settings ask for, or the chosen one, after checking it.

    Raises:
        ConfigError: for an unknown strategy, or a placement that does not fit roles and devices.
    """
    for name in settings.roles:
        settings_of(settings, name)
    strategy = user_code.named("placement.strategy", settings.strategy, STRATEGIES)
    if chosen is not None:
        placement = chosen
    elif settings.strategy in STRATEGIES:
        placement = strategy(roles, cluster, settings)
    else:
        placement = _by_users(strategy, roles, cluster, settings)
    _check(placement, roles, len(cluster.devices))
    return placement


def _by_users(
    strategy: Strategy, roles: Sequence[Role], cluster: Cluster, settings: PlacementConfig
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


def _check(placement: Placement, roles: Sequence[Role], devices: int) -> None:
    by = f"The placement `{placement.strategy}`"
    if placement.is_separated and ACTOR in placement.co_residents(GENERATOR):
        raise ConfigError(
            f"{by} puts `{GENERATOR}` and `actor` on the same device. Give them different ones, or "
            f"leave `{GENERATOR}` out: then the actor generates where it trains."
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
