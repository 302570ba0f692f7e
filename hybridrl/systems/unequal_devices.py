"""Devices that differ, from a file: `[{"name": "new"}, {"name": "old", "share": 0.5}]`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.errors import ConfigError, suggest_name

GIB = 2**30
EXAMPLE = '[{"name": "new"}, {"name": "old", "share": 0.5, "memory_gib": 16}]'


@dataclass(frozen=True)
class UnequalDevice:
    """A device described relative to the measured one, with its memory and link.

    Attributes:
        name: In tables.
        share: Of the speed of the device that is measured here.
        memory: Bytes that it has for the model.
        link: Bytes that it sends and receives in a second.
        device: Where it is measured, by torch's name; empty: where all are.
    """

    name: str
    share: float = 1.0
    memory: float = math.inf
    link: float = math.inf
    device: str = ""


def load_unequal_devices(path: str, known: Sequence[str]) -> list[UnequalDevice]:
    """Return the devices in a file, in rank order. What is not said of a device has no limit.

    Args:
        known: What may be said of one: of `name`, `share`, `memory_gib`, `link_gib_s`, `device`.

    Raises:
        ConfigError: if there is no such file, or it holds something else.
    """
    try:
        read = json.loads(Path(path).expanduser().read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"--devices {path} could not be read as JSON: {error}.") from error
    if not isinstance(read, list) or not read or not all(isinstance(one, dict) for one in read):
        raise ConfigError(
            f"--devices {path}: must be a list of objects with at least one, such as {EXAMPLE}."
        )
    return [_device(one, f"--devices {path}: device {n}", n, known) for n, one in enumerate(read)]


def _device(read: dict[str, Any], who: str, number: int, known: Sequence[str]) -> UnequalDevice:
    for name in read.keys() - set(known):
        raise ConfigError(
            f"{who} has `{name}`; what is known is {', '.join(known)}.{suggest_name(name, known)}"
        )

    def positive(name: str, usual: float) -> float:
        value = read.get(name, usual)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and (0 < value < math.inf or name not in read)):
            raise ConfigError(f"{who} has {name}={value!r}: must be a number above 0.")
        return float(value)

    return UnequalDevice(
        str(read.get("name", read.get("device", f"device {number}"))),
        positive("share", 1.0),
        positive("memory_gib", math.inf) * GIB,
        positive("link_gib_s", math.inf) * GIB,
        str(read.get("device", "")),
    )
