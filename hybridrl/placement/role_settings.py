"""What the settings say of one role: `placement.roles.<role>.devices`, `share` and `parallel`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from hybridrl.config.schema import ParallelConfig, PlacementConfig
from hybridrl.errors import ConfigError, nearest


@dataclass(frozen=True)
class RoleSettings:
    """Attributes:
    devices: Numbers of devices in rank order; None: as the strategy says.
    share: Part of all devices, in (0, 1]; None: as the strategy says.
    parallel: How the model is cut; None: as the actor's.
    """

    devices: tuple[int, ...] | None = None
    share: float | None = None
    parallel: ParallelConfig | None = None


def settings_of(settings: PlacementConfig, role: str) -> RoleSettings:
    """What is said of a role.

    Raises:
        ConfigError: for a name or a value that is none.
    """
    read = settings.roles.get(role) or {}
    name = f"placement.roles.{role}"
    _check_names(name, read, [f.name for f in fields(RoleSettings)])
    devices, share, parallel = read.get("devices"), read.get("share"), read.get("parallel")
    if devices is not None and not (_is_list(devices) and devices):
        raise ConfigError(f"{name}.devices={devices}: must be a list of device numbers: [0, 1].")
    if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
        raise ConfigError(f"{name}.share={share}: must be in (0, 1].")
    if parallel is not None:
        _check_names(f"{name}.parallel", parallel, [f.name for f in fields(ParallelConfig)])
        for key, size in parallel.items():
            if size is not None and not isinstance(size, int):
                raise ConfigError(f"{name}.parallel.{key}={size}: must be a whole number.")
    return RoleSettings(
        None if devices is None else tuple(devices),
        share,
        None if parallel is None else ParallelConfig(**parallel),
    )


def _check_names(name: str, read: Any, known: Iterable[str]) -> None:
    known = list(known)
    if not isinstance(read, Mapping):
        raise ConfigError(f"{name}={read}: is a group of settings; set {', '.join(known)} in it.")
    for key in read:
        if key not in known:
            raise ConfigError(
                f"There is no setting `{name}.{key}`; there are {', '.join(known)}."
                f"{nearest(str(key), known)}"
            )


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(d, int) for d in value)
