"""What the settings say of a role's place: `placement.roles.<role>.devices` and `share`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hybridrl.config.role_models import check_group_names
from hybridrl.config.schema import PlacementConfig
from hybridrl.errors import ConfigError


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
    if devices is not None and not (_is_device_list(devices) and devices):
        raise ConfigError(f"{name}.devices={devices}: must be a list of device numbers: [0, 1].")
    if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
        raise ConfigError(f"{name}.share={share}: must be in (0, 1].")
    return RolePlaceSettings(None if devices is None else tuple(devices), share)


def _is_device_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(d, int) for d in value)
