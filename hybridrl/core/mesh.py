"""Named mesh axes: which coordinate a rank has on which axis.

An *axis* belongs to a mesh, a *dim* to a tensor. The axes in use: `dp` (data), `pp` (pipeline),
`tp` (tensor) for training; `rollout_dp`, `rollout_tp` for generation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hybridrl.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks. `axes` maps axis name to size, outermost first; the last axis varies
    fastest over consecutive ranks."""

    axes: Mapping[str, int]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    def coordinates(self, rank: int) -> dict[str, Coordinate]:
        """Where `rank` stands on every axis."""
        if not 0 <= rank < self.size:
            raise ConfigError(f"Rank {rank} is not on a mesh of {self.size} ranks ({self.axes}).")
        found: dict[str, Coordinate] = {}
        for name, size in reversed(list(self.axes.items())):
            rank, index = divmod(rank, size)
            found[name] = Coordinate(index, size)
        return dict(reversed(list(found.items())))


@dataclass(frozen=True)
class Coordinate:
    """A place on one axis: `index` of `size`."""

    index: int
    size: int
