"""A piece of work: what a planner has to know of it, what was measured of it, and which pieces
stand for others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

FORWARD, TRAIN, DECODE, HEAD, HEAD_TRAIN, OPTIMIZER, GATHER = OPS = (
    *("forward", "train", "decode", "head", "head train", "optimizer", "gather"),
)
LAUNCHES = {FORWARD: 15, TRAIN: 45, DECODE: 18, HEAD: 4, HEAD_TRAIN: 10, OPTIMIZER: 12, GATHER: 3}
"""Kernels, about: what the network is told a piece of work begins with."""
LEAST_SPREAD = 0.02
"""Of a number of a description, to be told apart by it."""


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
