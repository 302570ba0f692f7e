"""The torch.distributed world of each worker group.

The hosts of a job hold many groups, on all devices or on some. Each group is a world of its own:
its ranks count from 0, what is inside it - meshes, FSDP, vLLM - need not know that there are
others, and no host has to take part in making a process group that it is not in. While a worker
runs a call, torch.distributed's default process group is that of its group (`enter_world`).
"""

from __future__ import annotations

import itertools
import os
import zlib
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hybridrl.layout.rank_mesh import MeshCoordinate, RankMesh
from hybridrl.layout.training_mesh import DATA_AXES
from hybridrl.parallel.collectives import make_own_group
from hybridrl.parallel.gradient_reduction import make_reduce_scatter
from hybridrl.system.collective_waits import start_timing_waits
from hybridrl.system.device_traits import COLLECTIVE_BACKENDS, set_current_device

if TYPE_CHECKING:
    from hybridrl.controller.worker import Rendezvous, WorkerContext

COLLECTIVE_TIMEOUT = timedelta(days=365)
"""Longer than any call's deadline (`controller.timeout_s`), which reports who hangs and where."""
_NAMES_PER_WORLD = 100_000

_worlds: dict[str, dist.ProcessGroup] = {}
_counts: dict[str, int] = {}
_current = ""


def join_group_world(context: WorkerContext) -> torch.device:
    """Join the world of `context.role`, once, make it the current one and return this host's
    device. Collective over the group.

    The ranks meet at the first one. In a job of this machine alone every socket is bound to
    loopback. The environment variables that launchers set, and vLLM reads, are set as well.
    """
    device = set_current_device(context.device_kind, context.local_rank)
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    join_world(
        context.role, context.rank, context.world_size, context.rendezvous, context.device_kind
    )
    return device


def join_world(
    name: str, rank: int, world_size: int, rendezvous: Rendezvous | None, device_kind: str
) -> dist.ProcessGroup:
    """Join a world of any name; see `join_group_world`.

    Args:
        rendezvous: Where the ranks meet; None: there is one only.
    """
    global _current
    if _worlds.get(name) not in distributed_c10d._world.pg_map:  # never made, or destroyed
        start_timing_waits()
        store = _store(rendezvous, world_size)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        _leave()
        # torch names process groups by counting, and ranks that meet must use the same names: each
        # world counts from a number of its own, however many worlds a host was in before.
        _counts[name] = _NAMES_PER_WORLD * (1 + zlib.crc32(name.encode()))
        _set(None, _counts[name])
        dist.init_process_group(
            COLLECTIVE_BACKENDS[device_kind],
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        _worlds[name] = dist.group.WORLD
        _counts[name] = distributed_c10d._world.group_count
        _current = name
    enter_world(name)
    return _worlds[name]


def enter_world(name: str) -> None:
    """Make a world of this host the current one of torch.distributed. Does nothing for a name that
    is no world's, since not every role has models."""
    global _current
    if name == _current or name not in _worlds:
        return
    _leave()
    _set(_worlds[name], _counts[name])
    _current = name


def find_store(group: dist.ProcessGroup) -> dist.Store:
    """Return the key-value store of a world."""
    return distributed_c10d._world.pg_map[group][1]


def _leave() -> None:
    global _current
    if _worlds.get(_current) in distributed_c10d._world.pg_map:
        _counts[_current] = distributed_c10d._world.group_count
    _current = ""


def _set(group: dist.ProcessGroup | None, count: int) -> None:
    distributed_c10d._update_default_pg(group)
    distributed_c10d._world.group_count = count


def _store(rendezvous: Rendezvous | None, world_size: int) -> dist.Store:
    if rendezvous is None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        return dist.HashStore()
    os.environ.update(MASTER_ADDR=rendezvous.address, MASTER_PORT=str(rendezvous.port))
    if rendezvous.address == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return dist.TCPStore(
        rendezvous.address,
        rendezvous.port,
        world_size,
        is_master=rendezvous.listener is not None,
        wait_for_workers=False,
        master_listen_fd=rendezvous.listener.detach() if rendezvous.listener else None,
    )


_NUMBERS = itertools.count()
"""Of the meshes of this process."""


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, for reading or writing; the tensor if it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
        stage_group: The process group of the ranks of one pipeline stage; None if this rank is
            alone in it.
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
            self._groups[axes] = self._make_group(axes)
        self._groups[tuple(mesh.axes)] = self._make_group(tuple(mesh.axes))
        stage = tuple(axis for axis in mesh.axes if axis != "pp")
        same = mesh.axes.get("pp", 1) == 1
        self.stage_group = self.group() if same else self._make_group(stage)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the process group of the ranks that differ from this one on `axes` only (no axes:
        all ranks of the mesh); None if this rank is alone."""
        return self._groups[axes or tuple(self.mesh.axes)]

    @property
    def is_first(self) -> bool:
        """True on the first rank of the mesh, which writes shared files."""
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
        if len(groups) == 1 and self.fsdp.ndim == 1 and self.data_ranks == len(groups[0]) > 1:
            return self.fsdp.get_group() if self.rank in self.mesh.grid else None
        return make_own_group(groups)
