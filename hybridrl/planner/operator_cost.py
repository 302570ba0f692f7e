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

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

FORWARD, TRAIN, DECODE, HEAD, HEAD_TRAIN, OPTIMIZER, GATHER = OPS = (
    *("forward", "train", "decode", "head", "head train", "optimizer", "gather"),
)
LAUNCHES = {FORWARD: 15, TRAIN: 45, DECODE: 18, HEAD: 4, HEAD_TRAIN: 10, OPTIMIZER: 12, GATHER: 3}
"""Kernels, about: what the network is told a piece of work begins with."""
NETWORKS, WIDTH, ROUNDS = 4, 48, 700
"""Of the ensemble, of each hidden layer, and of training."""
NOISE = 0.03
"""Of a measurement, as a share of it."""
FAR = 6.0
"""A sample tells of others within this distance, in standard deviations of the description: chosen
on the tables of `benchmarks/operator_cost.py`."""
LEAST_SPREAD = 0.02


@dataclass(frozen=True)
class Work:
    """A piece of work.

    Attributes:
        op: One of `OPS`.
        tokens: That it works on; rows for `decode`, elements for `optimizer`, bytes that each rank
            receives for `gather`.
        length: Tokens of a sample, or in the cache.
        hidden: Width of the states.
        parameters: That a token is multiplied with, of a layer or a head.
        query, key_value: Elements of a token's queries, and of its keys and values.
        item: Bytes of an element.
    """

    op: str
    tokens: float
    length: float = 1.0
    hidden: float = 1.0
    parameters: float = 1.0
    query: float = 1.0
    key_value: float = 1.0
    item: int = 4

    @property
    def operations(self) -> float:
        """In products: two for each parameter and token, and attention over the tokens before."""
        layer = 2 * self.tokens * self.parameters
        attention = 2 * self.tokens * self.length * self.query
        match self.op:
            case "forward":
                return layer + attention
            case "train":
                return 3 * (layer + attention)
            case "decode":
                return layer + 2 * attention
            case "head":
                return layer
            case "head train":
                return 4 * layer
            case "optimizer":
                return 10 * self.tokens
        return 0.0

    @property
    def bytes(self) -> float:
        """Of memory, read or written."""
        weights = self.item * self.parameters
        widths = 6 * self.hidden + 2 * self.parameters / self.hidden + 2 * self.query
        states = self.item * self.tokens * widths
        logits = 4.0 * self.tokens * self.parameters / self.hidden
        match self.op:
            case "forward":
                return weights + states
            case "train":
                return 3 * (weights + states)
            case "decode":
                return weights + states + self.item * self.tokens * self.length * self.key_value
            case "head":
                return weights + 4 * logits
            case "head train":
                return 3 * weights + 12 * logits
            case "optimizer":
                return 40 * self.tokens
        return 2 * self.tokens


@dataclass(frozen=True)
class Device:
    """What a probe knows of a device.

    Attributes:
        flops: Operations per second in products of large matrices.
        flops_small: The same of matrices with few rows, as in generation.
        memory, link: Bytes per second.
        small_op: Seconds of an operation on a handful of numbers.
        threads: That it computes with; 1 for accelerators.
    """

    flops: float
    flops_small: float
    memory: float
    link: float
    small_op: float
    threads: int = 1


class Sample(NamedTuple):
    """A measurement."""

    work: Work
    seconds: float


@dataclass(frozen=True)
class Table:
    """What was measured on a device."""

    device: Device
    samples: Sequence[Sample]

    def to_data(self) -> dict[str, Any]:
        """As plain data; `of_data` reads it."""
        rows = [{**asdict(work), "seconds": seconds} for work, seconds in self.samples]
        return {"device": asdict(self.device), "samples": rows}

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Table:
        """What `to_data` gave."""
        samples = []
        for row in data["samples"]:
            seconds = row["seconds"]
            work = Work(**{name: value for name, value in row.items() if name != "seconds"})
            samples.append(Sample(work, seconds))
        return cls(Device(**data["device"]), samples)


def roofline(works: Sequence[Work], device: Device) -> np.ndarray:
    """Seconds of each, if its parts came one after the other at the device's rates."""
    return np.array([sum(_parts(work, device)) for work in works])


def _parts(work: Work, device: Device) -> tuple[float, float, float]:
    rate = device.flops_small if work.op == DECODE else device.flops
    moved = device.link if work.op == GATHER else device.memory
    return (
        work.operations / rate,
        work.bytes / moved,
        LAUNCHES[work.op] * device.small_op,
    )


def described(works: Sequence[Work], device: Device) -> np.ndarray:
    """A row of numbers for each, alike where loops and their proportions are."""
    rows = []
    for work in works:
        parts = _parts(work, device)
        whole = sum(parts)
        rows.append(
            [
                *(2.0 * (work.op == op) for op in OPS),
                *map(math.log, (work.tokens, work.length, work.hidden, work.parameters)),
                *map(math.log, (work.query / work.hidden, work.key_value / work.hidden)),
                math.log(work.parameters / work.hidden**2),
                *(math.log(max(1.0, number)) for number in (work.operations, work.bytes)),
                *(part / whole for part in parts),
                *map(math.log, (device.flops, device.flops_small, device.memory)),
                *map(math.log, (device.link, device.small_op, device.threads)),
            ]
        )
    return np.array(rows)


DEVICE_COLUMNS = 6
"""The last ones of a description."""


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
        apart = ((x[:, None, :] - self._x[None]) ** 2).sum(-1)
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


def chosen(works: Sequence[Work], device: Device, number: int, seed: int = 0) -> list[int]:
    """Of much work the pieces that stand for the rest, by KMeans over their descriptions: those
    nearest to the centres.

    Args:
        number: At most.
    """
    x = described(works, device)[:, :-DEVICE_COLUMNS]
    x = (x - x.mean(0)) / np.maximum(x.std(0), LEAST_SPREAD)
    draws = np.random.default_rng(seed)
    centres = x[[int(draws.integers(len(x)))]]
    while len(centres) < min(number, len(x)):  # far from those that there are
        apart = ((x[:, None] - centres[None]) ** 2).sum(-1).min(1)
        if not apart.sum():
            break
        centres = np.concatenate([centres, x[[int(draws.choice(len(x), p=apart / apart.sum()))]]])
    for _ in range(20):
        nearest = ((x[:, None] - centres[None]) ** 2).sum(-1).argmin(1)
        centres = np.array(
            [
                x[nearest == c].mean(0) if (nearest == c).any() else centres[c]
                for c in range(len(centres))
            ]
        )
    apart = ((x[:, None] - centres[None]) ** 2).sum(-1)
    return sorted({int(one) for one in apart.argmin(0)})
