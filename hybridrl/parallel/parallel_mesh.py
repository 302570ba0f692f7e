"""The process groups of one rank on the mesh on which a model is trained."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.layout.rank_mesh import MeshCoordinate, RankMesh
from hybridrl.layout.training_mesh import DATA_AXES
from hybridrl.parallel.gradient_reduction import make_reduce_scatter

_NUMBERS = itertools.count()
"""Of the meshes of this process."""


class ParallelMesh:
    """The process groups of one rank: one for each axis of the mesh, and FSDP's own mesh.

    Building it is collective over the default process group, which is the worker group's own (see
    `process_group`): all its ranks take part, in the same order.

    Args:
        mesh: Its ranks are those of the default process group, or some of them.
        device: This rank's device.
        shards: See `ParallelConfig.shards`.
        gradients: See `ParallelConfig.gradients`.

    Attributes:
        coordinates: Where this rank stands.
        fsdp: The ranks that share, or copy, this rank's parameters: one axis, or (copies, shards).
        reduce_scatter: How gradients are summed over the ranks that share them; None: in full.
    """

    def __init__(
        self,
        mesh: RankMesh,
        device: torch.device,
        shards: int | None = None,
        gradients: str = "full",
    ) -> None:
        self.mesh = mesh
        self.device = device
        self.rank = dist.get_rank()
        self._groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}
        self.coordinates = (
            mesh.coordinates(self.rank)
            if self.rank in mesh.grid
            else {name: MeshCoordinate(0, size) for name, size in mesh.axes.items()}
        )
        data = mesh.groups(*DATA_AXES)
        self.data_ranks = len(data[0])
        self.copies = self.data_ranks // (shards or self.data_ranks)
        self.fsdp = self._fsdp_mesh(torch.tensor(data))
        rows = torch.tensor(data).view(-1, self.data_ranks // self.copies)
        self.reduce_scatter = make_reduce_scatter(gradients, rows.tolist(), device)
        for axes in (("dp",), ("ring",), ("ulysses",), ("ring", "ulysses"), ("pp",), ("tp",)):
            self._groups[axes] = self._make_group(axes) if mesh.axes.keys() & set(axes) else None
        self._groups[tuple(mesh.axes)] = self._make_group(tuple(mesh.axes))

    @classmethod
    def data_parallel(cls, device: torch.device, ranks: int) -> ParallelMesh:
        """Build the mesh of one axis, `dp`, over the first `ranks` processes."""
        return cls(RankMesh({"dp": ranks}), device)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the process group of the ranks that differ from this one on `axes` only (no axes:
        all ranks of the mesh); None if this rank is alone."""
        return self._groups[axes or tuple(self.mesh.axes)]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the mesh, which writes shared files."""
        return self.rank == self.mesh.grid[0]

    @property
    def place(self) -> int:
        """The number of this rank in layouts of the mesh: its rank in `group()`."""
        group = self.group()
        return 0 if group is None else dist.get_rank(group)

    def size(self, *axes: str) -> int:
        """Return the number of ranks in `group(*axes)`."""
        group = self.group(*axes)
        return 1 if group is None else dist.get_world_size(group)

    def index(self, axis: str) -> int:
        """Return this rank's coordinate on an axis."""
        return self.coordinates[axis].index if axis in self.coordinates else 0

    def _fsdp_mesh(self, data: torch.Tensor) -> DeviceMesh:
        """Build the device mesh of FSDP from `data`, `[positions on the other axes, ranks]`."""
        # torch takes meshes of equal ranks and names for the same, and remembers by mesh what an
        # operation needs: another worker group's process groups, if the names did not differ.
        number = next(_NUMBERS)
        shape, names = [self.data_ranks], [f"data{number}"]
        if self.copies > 1:
            shape = [self.copies, self.data_ranks // self.copies]
            names = [f"copies{number}", f"shards{number}"]
        if len(data) == 1:
            return DeviceMesh(self.device.type, data.reshape(shape), mesh_dim_names=tuple(names))
        grid = data.reshape(-1, *shape).movedim(0, -1)
        whole = DeviceMesh(self.device.type, grid, mesh_dim_names=(*names, "model"))
        if self.rank not in self.mesh.grid:
            return whole  # only made because all ranks of the group make it together
        return whole[tuple(names)] if self.copies > 1 else whole[names[0]]

    def _make_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        groups = self.mesh.groups(*axes)
        if len(groups[0]) == 1:
            return None
        if len(groups) == 1 and self.fsdp.ndim == 1 and self.data_ranks == len(groups[0]):
            return self.fsdp.get_group() if self.rank in self.mesh.grid else None
        mine, _ = dist.new_subgroups_by_enumeration(groups)
        return mine
