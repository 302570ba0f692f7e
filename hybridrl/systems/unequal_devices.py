"""Devices that differ, from a file: `[{"name": "new"}, {"name": "old", "share": 0.5}]`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.errors import ConfigError, nearest
from hybridrl.planner.machine.device_catalog import GIB
from hybridrl.systems.low_bits.bit_allocation import UnequalDevice

KNOWN = ("name", "share", "memory_gib", "link_gib_s")


def load_devices(path: str) -> list[UnequalDevice]:
    """The devices in a file, in rank order. Each has a `name`, the `share` of this machine's
    device's speed that it has (1), `memory_gib` for the model, and `link_gib_s`, what it sends and
    receives in a second; what is not said has no limit.

    Raises:
        ConfigError: if there is no such file, or it holds something else.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"--devices {path}: there is no such file.")
    try:
        read = json.loads(file.read_text())
        if not isinstance(read, list) or not read:
            raise ValueError("a list of at least one device is expected")
        return [_device(one, number) for number, one in enumerate(read)]
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise ConfigError(
            f"--devices {path}: {error}. Write a JSON list such as "
            '[{"name": "new"}, {"name": "old", "share": 0.5, "memory_gib": 16}].'
        ) from error


def _device(read: Mapping[str, Any], number: int) -> UnequalDevice:
    if not isinstance(read, Mapping):
        raise ValueError(f"device {number} is no group of names and values")
    for name in read:
        if name not in KNOWN:
            raise ValueError(
                f"device {number} has `{name}`; there are {', '.join(KNOWN)}{nearest(name, KNOWN)}"
            )
    return UnequalDevice(
        str(read.get("name", f"device {number}")),
        _positive(read, "share", 1.0, number),
        _positive(read, "memory_gib", math.inf, number) * GIB,
        _positive(read, "link_gib_s", math.inf, number) * GIB,
    )


def _positive(read: Mapping[str, Any], name: str, usual: float, number: int) -> float:
    if name not in read:
        return usual
    value = read[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):
        raise ValueError(f"device {number} has {name}={value!r}, which must be a number above 0")
    return float(value)
