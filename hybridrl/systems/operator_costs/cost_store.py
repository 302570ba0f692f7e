"""What was measured of this machine's devices by `hybridrl calibrate`, for plans."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from hybridrl.planner.machine.device_rates import Rates
from hybridrl.planner.machine.measurement_cache import cache_file, write_cached
from hybridrl.planner.step.operator_work import Table
from hybridrl.system.cluster_spec import Cluster
from hybridrl.system.cpu_cores import usable_cores
from hybridrl.systems.operator_costs.cost_model import DeviceCosts


def keep_table(cluster: Cluster, dtype: str, table: Table) -> Path | None:
    """Notes what was measured; gives the file, or None where it cannot be written.

    Args:
        cluster: The devices, by the names that `planner.machine.device_catalog.present` gives them.
        dtype: Name of the precision of computation.
    """
    file = _file(cluster, dtype)
    data = {"model": cluster.devices[0].model, "dtype": dtype, **table.to_data()}
    return file if write_cached(file, json.dumps(data)) else None


def other_tables(cluster: Cluster, dtype: str) -> list[Table]:
    """Of other devices, from which something can be learned about these: all that lie in the same
    folder, whoever has put them there."""
    return _beside(_file(cluster, dtype), dtype)


def rates_of(cluster: Cluster, dtype: str) -> Sequence[Rates]:
    """Of each device of a cluster whose rates are known; with the costs of its work, if they were
    measured on this machine."""
    file = _file(cluster, dtype)
    if not file.is_file():
        return Rates.known(cluster, dtype)
    costs = _costs(file, file.stat().st_mtime_ns, cluster.devices[0].model)
    return Rates.known(cluster, dtype, costs)


def has_costs(cluster: Cluster, dtype: str) -> bool:
    """Whether work was measured on these devices of this machine."""
    return _file(cluster, dtype).is_file()


@lru_cache(maxsize=4)
def _costs(file: Path, written: int, model: str) -> DeviceCosts | None:
    """Of the file as it was then: to learn from it takes a second."""
    table = _read(file, model)
    if table is None:
        return None
    return DeviceCosts(table, _beside(file, file.stem.rpartition("-")[2]))


def _beside(own: Path, dtype: str) -> list[Table]:
    files = sorted(own.parent.glob(f"*-{dtype}.json"))
    return [table for file in files if file != own and (table := _read(file)) is not None]


def _read(file: Path, model: str | None = None) -> Table | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        data = json.loads(file.read_text())
        if model in (None, data["model"]):
            return Table.of_data(data)
    return None


def _file(cluster: Cluster, dtype: str) -> Path:
    number = cluster.devices_per_node
    name = f"{socket.gethostname()}-{number}x{cluster.kind}-{usable_cores()}cores-{dtype}.json"
    return cache_file("costs", name)
