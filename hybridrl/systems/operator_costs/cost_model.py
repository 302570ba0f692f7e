"""Predict the seconds of a piece of work on a device (a layer, a head, a token of generation, an
update, a collective) from measurements.

A *roofline* says what it would take if products, memory and launches each ran at the device's
rates. By what factor that is wrong, a Gaussian process tells from a compact description of the
loops (how much is multiplied, read and kept, in what proportions) and of the device: work that was
measured near by counts, on this device most of all. (CDMPP, Hu et al., EuroSys 2024, predicts
tensor programs across devices from such descriptions, with samples that KMeans has chosen.)

Needs scikit-learn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from hybridrl.planner.step.operator_work import (
    DECODE,
    FORWARD,
    GATHER,
    HEAD,
    HEAD_TRAIN,
    OPERATORS,
    OPTIMIZER,
    TRAIN,
    OperatorWork,
)
from hybridrl.system.cluster_spec import ClusterSpec

KERNEL_LAUNCHES = {
    FORWARD: 15,
    TRAIN: 45,
    DECODE: 18,
    HEAD: 4,
    HEAD_TRAIN: 10,
    OPTIMIZER: 12,
    GATHER: 3,
}
"""Kernels, about: what the model is told a piece of work begins with."""
LEAST_SPREAD = 0.02
"""Of a number of a description, to be told apart by it."""
_MEASUREMENT_NOISE = 1e-3
"""Variance of a measurement's logarithm, in those of all factors."""
_LENGTH_SCALE = 4.0
"""A sample tells of others within this distance, in standard deviations of the description: chosen
on the tables of `benchmarks/operator_cost.py`."""


@dataclass(frozen=True)
class DeviceProfile:
    """The rates of a device that its costs are learned with.

    Attributes:
        flops: Operations per second in products of large matrices.
        few_rows: The same of matrices with few rows, as in generation.
        memory, link: Bytes per second.
        small_op: Seconds of an operation on a handful of numbers.
    """

    flops: float
    few_rows: float
    memory: float
    link: float
    small_op: float

    @classmethod
    def of_cluster(cls, cluster: ClusterSpec, dtype: str) -> DeviceProfile:
        """Return the rates of the devices of a cluster that was probed."""
        model, host = cluster.models[cluster.devices[0].model], cluster.hosts[cluster.nodes[0]]
        few_rows = model.few_rows or model.flops[dtype]
        link = host.inside.bandwidth
        return cls(model.flops[dtype], few_rows, model.bandwidth, link, model.small_op)


class CostSample(NamedTuple):
    """A measurement."""

    work: OperatorWork
    seconds: float


@dataclass(frozen=True)
class CostTable:
    """The measurements of one device, and its rates."""

    device: DeviceProfile
    samples: Sequence[CostSample]

    @property
    def works(self) -> list[OperatorWork]:
        """Return the pieces of work that were measured."""
        return [sample.work for sample in self.samples]

    @property
    def seconds(self) -> np.ndarray:
        """Return what each of them took."""
        return np.array([sample.seconds for sample in self.samples])

    def to_data(self) -> dict[str, Any]:
        """Return the table as plain data, for `of_data`."""
        rows = [{**asdict(work), "seconds": seconds} for work, seconds in self.samples]
        return {"device": asdict(self.device), "samples": rows}

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> CostTable:
        """Build a table from what `to_data` returned."""
        rows = [dict(row) for row in data["samples"]]
        samples = [CostSample(seconds=row.pop("seconds"), work=OperatorWork(**row)) for row in rows]
        return cls(DeviceProfile(**data["device"]), samples)


class OperatorCostModel:
    """A model that predicts the seconds of operators on several devices.

    Args:
        tables: Of the devices that are known.
    """

    def __init__(self, tables: Sequence[CostTable]) -> None:
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern

        x = np.concatenate([describe_work(table.works, table.device) for table in tables])
        factors = [table.seconds / roofline_seconds(table.works, table.device) for table in tables]
        self._mean, self._spread = x.mean(0), np.maximum(x.std(0), LEAST_SPREAD)
        self._process = GaussianProcessRegressor(
            Matern(_LENGTH_SCALE, nu=2.5),
            alpha=_MEASUREMENT_NOISE,
            optimizer=None,
            normalize_y=True,
        ).fit((x - self._mean) / self._spread, np.log(np.concatenate(factors)))

    def seconds(self, works: Sequence[OperatorWork], device: DeviceProfile) -> np.ndarray:
        """Predict the seconds of each piece of work, on a device with samples or only with
        rates."""
        x = (describe_work(works, device) - self._mean) / self._spread
        return np.asarray(roofline_seconds(works, device) * np.exp(self._process.predict(x)))


class DeviceCostModel:
    """A `CostPredictor` of one device, which is asked about one piece of work at a time.

    Args:
        table: Of this device.
        others: Of devices from which something can be learned about it.
        source: Which measurement this is.
    """

    def __init__(
        self, table: CostTable, others: Sequence[CostTable] = (), source: str = "measured work"
    ) -> None:
        self.source = source
        self._device = table.device
        self._costs = OperatorCostModel([table, *others])
        self._known: dict[OperatorWork, float] = {}

    def seconds(self, work: OperatorWork) -> float:
        if work not in self._known:
            self._known[work] = float(self._costs.seconds([work], self._device)[0])
        return self._known[work]


def roofline_seconds(works: Sequence[OperatorWork], device: DeviceProfile) -> np.ndarray:
    """Return the seconds of each piece of work if its products, memory and launches came one after
    the other at the device's rates."""
    return np.array([sum(_parts(work, device)) for work in works])


def _parts(work: OperatorWork, device: DeviceProfile) -> tuple[float, float, float]:
    rate = device.few_rows if work.op == DECODE else device.flops
    moved = device.link if work.op == GATHER else device.memory
    return (
        work.operations / rate,
        work.bytes / moved,
        KERNEL_LAUNCHES[work.op] * device.small_op,
    )


def describe_work(works: Sequence[OperatorWork], device: DeviceProfile) -> np.ndarray:
    """Describe each piece of work by a row of numbers, alike where loops and proportions are."""
    rows = []
    for work in works:
        parts = _parts(work, device)
        whole = sum(parts)
        rows.append(
            [
                *(2.0 * (work.op == op) for op in OPERATORS),
                *map(math.log, (work.tokens, work.length, work.hidden, work.parameters)),
                *map(math.log, (work.query / work.hidden, work.key_value / work.hidden)),
                math.log(work.parameters / work.hidden**2),
                *(math.log(max(1.0, number)) for number in (work.operations, work.bytes)),
                *(part / whole for part in parts),
                *map(math.log, asdict(device).values()),
            ]
        )
    return np.array(rows)


def choose_representative(
    works: Sequence[OperatorWork], device: DeviceProfile, number: int
) -> list[int]:
    """Choose the pieces of work that stand for the rest: those nearest to the centres of a KMeans
    over their descriptions.

    Args:
        number: At most.
    """
    from sklearn.cluster import KMeans
    from sklearn.metrics import pairwise_distances_argmin

    x = describe_work(works, device)
    x = (x - x.mean(0)) / np.maximum(x.std(0), LEAST_SPREAD)
    centres = min(number, len(np.unique(x, axis=0)))
    means = KMeans(centres, n_init=1, random_state=0).fit(x)
    return sorted({int(one) for one in pairwise_distances_argmin(means.cluster_centers_, x)})
