"""Measurements of this machine, with their date and the load beside them: one file of the user's
cache for each machine, `$XDG_CACHE_HOME/hybridrl/measurements/<host>.json`.

A plan that rests on a measurement says which one and how old it is. Measurements of other machines
count where their files are copied into the folder, for what is learned across devices.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridrl.config.schema import CacheConfig
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.system.container_limits import count_usable_cores
from hybridrl.system.content_cache import find_cache_folder
from hybridrl.system.formatting import format_seconds
from hybridrl.system.locations import write_atomically

CLUSTER, LAYERS, OPERATORS, PREDICTIONS = "cluster", "layers", "operators", "predictions"
"""Kinds of measurements: rates of devices and links, layers of a model, pieces of work, and how far
predictions were off."""
FRESH_S = 7 * 86400.0
"""Rates and layers that were measured longer ago are measured anew."""
KEPT = 200
"""Measurements in a file, the newest."""
JUST_NOW_S = 60.0


@dataclass(frozen=True)
class Measurement:
    """Something that was measured.

    Attributes:
        kind: `CLUSTER`, `LAYERS`, `OPERATORS` or `PREDICTIONS`.
        about: What it is of: two that agree in it take each other's place.
        data: What was found.
        date: When, seconds since the epoch.
        load: The machine's load average just before.
    """

    kind: str
    about: Mapping[str, Any]
    data: Any
    date: float
    load: float

    def __str__(self) -> str:
        age = time.time() - self.date
        when = "just now" if age < JUST_NOW_S else f"{format_seconds(age)} ago"
        return f"measured {when} at a load of {self.load:.1f}"


def begin_measurement(kind: str, about: Mapping[str, Any]) -> Measurement:
    """Return a measurement that is still without data, with the time and the load of now."""
    return Measurement(kind, about, None, time.time(), os.getloadavg()[0])


def describe_devices(cluster: ClusterSpec) -> dict[str, Any]:
    """Return what tells measurements of these devices apart: their kind, their number on a node
    and the cores that they share."""
    devices = {"devices": cluster.kind, "number": cluster.devices_per_node}
    return devices | {"nodes": len(cluster.nodes), "cores": count_usable_cores()}


def keep_measurement(measurement: Measurement) -> Path | None:
    """Put a measurement in the place of an earlier one about the same.

    Returns:
        The file; None where it cannot be written: what is lost is measured again.
    """
    file = _file()
    others = [
        one for one in _read(file) if (one.kind, one.about) != (measurement.kind, measurement.about)
    ]
    kept = [*others, measurement][-KEPT:]
    content = json.dumps({"measurements": [asdict(one) for one in kept]})
    with contextlib.suppress(OSError):
        write_atomically(file, content.encode())
        return file
    return None


def find_measurement(
    kind: str, about: Mapping[str, Any], oldest_s: float = FRESH_S
) -> Measurement | None:
    """Return the measurement of this machine about this; None where there is none that is fresh."""
    least = time.time() - oldest_s
    for one in _read(_file()):
        if (one.kind, one.about) == (kind, about) and one.date >= least:
            return one
    return None


def other_machines(kind: str) -> Iterator[Measurement]:
    """Yield what lies in the folder of other machines' measurements of a kind."""
    own = _file()
    for file in sorted(own.parent.glob("*.json")):
        if file != own:
            yield from (one for one in _read(file) if one.kind == kind)


def _file() -> Path:
    return find_cache_folder(CacheConfig()) / "measurements" / f"{socket.gethostname()}.json"


def _read(file: Path) -> list[Measurement]:
    """None of them where the file is not there, is cut short, or is something else."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return [Measurement(**one) for one in json.loads(file.read_text())["measurements"]]
    return []
