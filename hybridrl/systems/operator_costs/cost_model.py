"""What a piece of work takes on a device: a layer, a head, a token of generation, an update, a
collective. Learned from measurements, in three storeys.

A *roofline* says what it would take if products, memory and launches each ran at the device's
rates. A small network learns, over devices and models, by what factor that is wrong: from a compact
description of the loops (how much is multiplied, read and kept, in what proportions) and of the
device. And on a device of which a few samples are known, the rest is told by those near by: a
Gaussian process over the same description, whose mean is the network. (CDMPP, Hu et al., EuroSys
2024, predicts tensor programs across devices so, with samples that KMeans has chosen.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hybridrl.planner.step.operator_work import (
    DEVICE_COLUMNS,
    LEAST_SPREAD,
    Device,
    Table,
    Work,
    described,
    roofline,
)

NETWORKS, WIDTH, ROUNDS = 4, 32, 300
"""Of the ensemble, of each hidden layer, and of training."""
NOISE = 0.1
"""Of a measurement, as a share of it."""
FAR = 6.0
"""A sample tells of others within this distance, in standard deviations of the description: chosen
on the tables of `benchmarks/operator_cost.py`."""


class OperatorCosts:
    """Predicts seconds.

    Args:
        tables: Of the devices that are known.
        seed: Of the networks' weights.
    """

    def __init__(self, tables: Sequence[Table], seed: int = 0) -> None:
        rows, targets = [], []
        for table in tables:
            works = [sample.work for sample in table.samples]
            seconds = np.array([sample.seconds for sample in table.samples])
            rows.append(described(works, table.device))
            targets.append(np.log(seconds / roofline(works, table.device)))
        x, y = np.concatenate(rows), np.concatenate(targets)
        self._mean, self._spread = x.mean(0), np.maximum(x.std(0), LEAST_SPREAD)
        self._middle = float(y.mean())
        self._networks = _trained(self._scaled(x), y - self._middle, seed)
        self._near: dict[Device, _Near] = {}
        for table in tables:
            self.add(table)

    def add(self, table: Table) -> None:
        """Takes samples of a device, known or new, for what it is asked of this device."""
        works = [sample.work for sample in table.samples]
        seconds = np.array([sample.seconds for sample in table.samples])
        left = np.log(seconds / self._learned(works, table.device))
        self._near[table.device] = _Near(self._of_work(works, table.device), left)

    def seconds(self, works: Sequence[Work], device: Device) -> np.ndarray:
        """Of each piece of work, on a device of which it has samples, or only the rates."""
        found = self._learned(works, device)
        if device in self._near:
            found = found * np.exp(self._near[device].left(self._of_work(works, device)))
        return found

    def _learned(self, works: Sequence[Work], device: Device) -> np.ndarray:
        x = torch.tensor(self._scaled(described(works, device)), dtype=torch.float32)
        with torch.no_grad():
            factors = torch.stack([network(x)[:, 0] for network in self._networks]).mean(0)
        return roofline(works, device) * np.exp(factors.numpy() + self._middle)

    def _scaled(self, x: np.ndarray) -> np.ndarray:
        return (x - self._mean) / self._spread

    def _of_work(self, works: Sequence[Work], device: Device) -> np.ndarray:
        return self._scaled(described(works, device))[:, :-DEVICE_COLUMNS]


class DeviceCosts:
    """What work takes on one device, asked one by one.

    Args:
        table: Of this device.
        others: Of devices from which something can be learned about it.
    """

    def __init__(self, table: Table, others: Sequence[Table] = ()) -> None:
        self._device = table.device
        self._costs = OperatorCosts([table, *others])
        self._known: dict[Work, float] = {}

    def seconds(self, work: Work) -> float:
        """Of a piece of work."""
        if work not in self._known:
            self._known[work] = float(self._costs.seconds([work], self._device)[0])
        return self._known[work]


class _Near:
    """A Gaussian process: what is left of a logarithm, told by the samples near by."""

    def __init__(self, x: np.ndarray, left: np.ndarray) -> None:
        self._x = x
        self._variance = max(float((left**2).mean()), NOISE**2)
        kernel = self._kernel(x) + NOISE**2 * np.eye(len(x))
        self._weights = np.linalg.solve(kernel, left)

    def left(self, x: np.ndarray) -> np.ndarray:
        """Of other work."""
        return np.asarray(self._kernel(x) @ self._weights)

    def _kernel(self, x: np.ndarray) -> np.ndarray:
        apart = (x**2).sum(1)[:, None] + (self._x**2).sum(1)[None] - 2 * x @ self._x.T
        apart = np.maximum(apart, 0.0)
        smooth = np.exp(-apart / (2 * FAR**2))
        rough = np.exp(-apart / (2 * (FAR / 4) ** 2))
        return np.asarray(self._variance * (0.7 * smooth + 0.3 * rough))


def _trained(x: np.ndarray, y: np.ndarray, seed: int) -> list[torch.nn.Module]:
    """An ensemble, each from weights of its own. The error that counts is relative, so that of
    logarithms is made small."""
    inputs = torch.tensor(x, dtype=torch.float32)
    targets = torch.tensor(y, dtype=torch.float32)[:, None]
    found: list[torch.nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        for number in range(NETWORKS):
            torch.manual_seed(seed + number)
            network = torch.nn.Sequential(
                torch.nn.Linear(inputs.shape[1], WIDTH),
                torch.nn.SiLU(),
                torch.nn.Linear(WIDTH, WIDTH),
                torch.nn.SiLU(),
                torch.nn.Linear(WIDTH, 1),
            )
            optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=3e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ROUNDS)
            for _ in range(ROUNDS):
                optimizer.zero_grad()
                loss = torch.nn.functional.smooth_l1_loss(network(inputs), targets, beta=0.1)
                loss.backward()
                optimizer.step()
                schedule.step()
            found.append(network.eval())
    return found
