"""Named mesh axes and the coordinate of each rank on them.

An *axis* belongs to a mesh, a *dim* to a tensor. The axes in use: `dp` (data), `ring` and `ulysses`
(sequence), `pp` (pipeline), `tp` (tensor) for training; `rollout_dp`, `rollout_tp` for generation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from hybridrl.errors import ConfigError


@dataclass(frozen=True)
class MeshCoordinate:
    """A coordinate on one axis: `index` of `size`."""

    index: int
    size: int


@dataclass(frozen=True)
class RankMesh:
    """A grid of ranks with named axes.

    Attributes:
        axes: Axis name to size, outermost first; the last axis varies fastest over the grid.
        ranks: The rank at each place of the grid, row by row; None: 0, 1, 2, ...
    """

    axes: Mapping[str, int]
    ranks: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.axes.values())

    @property
    def grid(self) -> tuple[int, ...]:
        """The rank at each position of the grid, row by row."""
        return self.ranks or tuple(range(self.size))

    def coordinates(self, rank: int) -> dict[str, MeshCoordinate]:
        """Return the coordinate of `rank` on every axis."""
        if rank not in self.grid:
            raise ConfigError(f"Rank {rank} is not on a mesh of {self.size} ranks ({self.axes}).")
        place = self.grid.index(rank)
        found: dict[str, MeshCoordinate] = {}
        for name, size in reversed(list(self.axes.items())):
            place, index = divmod(place, size)
            found[name] = MeshCoordinate(index, size)
        return dict(reversed(list(found.items())))

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ on these axes only, each in the order of the
        grid."""
        indices = itertools.product(*(range(size) for size in self.axes.values()))
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, index in zip(self.grid, indices, strict=True):
            others = tuple(i for name, i in zip(self.axes, index, strict=True) if name not in axes)
            found.setdefault(others, []).append(rank)
        return list(found.values())
