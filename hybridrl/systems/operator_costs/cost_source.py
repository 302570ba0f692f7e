"""Work that `hybridrl calibrate` has measured on this machine, for plans."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

from hybridrl.planner.machine.cluster_rates import COST_SOURCES
from hybridrl.planner.machine.measurements import (
    OPERATORS,
    describe_devices,
    find_measurement,
    other_machines,
)
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.systems.operator_costs.cost_model import CostTable, DeviceCostModel

_LEARNED: dict[float, DeviceCostModel] = {}
"""By the date of the measurement: to learn from it takes a second."""


def describe_table(cluster: ClusterSpec, dtype: str) -> dict[str, Any]:
    """Return what tells tables of this machine apart.

    Args:
        cluster: The devices, by the names that `device_catalog.add_device_memory` gives them.
        dtype: Name of the precision of computation.
    """
    return {**describe_devices(cluster), "model": cluster.devices[0].model, "dtype": dtype}


def load_other_tables(dtype: str) -> list[CostTable]:
    """Return those of other machines, from which something can be learned about this one."""
    return [
        CostTable.of_data(one.data)
        for one in other_machines(OPERATORS)
        if one.about.get("dtype") == dtype
    ]


def find_costs(cluster: ClusterSpec, dtype: str) -> DeviceCostModel | None:
    """Return what work takes on the devices of a cluster; None where it was not measured on this
    machine, or scikit-learn is not there to learn from it."""
    kept = find_measurement(OPERATORS, describe_table(cluster, dtype), oldest_s=math.inf)
    if kept is None or importlib.util.find_spec("sklearn") is None:
        return None
    if kept.date not in _LEARNED:
        table = CostTable.of_data(kept.data)
        _LEARNED[kept.date] = DeviceCostModel(
            table, load_other_tables(dtype), f"pieces of work {kept}"
        )
    return _LEARNED[kept.date]


def offer_costs() -> None:
    """Have plans ask `find_costs`."""
    if find_costs not in COST_SOURCES:
        COST_SOURCES.append(find_costs)
