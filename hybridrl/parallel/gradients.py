"""From `parallel.gradients` to the way that gradients are summed."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch.distributed as dist

from hybridrl.compress.gradients import INT4, INT8, CompressedReduceScatter, Hop
from hybridrl.core.nodes import ranks_by_node


def make_reduce_scatter(kind: str, rows: Sequence[Sequence[int]]) -> CompressedReduceScatter | None:
    """What sums the gradients of the row of ranks that this one is in. Collective over the default
    process group.

    Args:
        kind: See `ParallelConfig.gradients`.
        rows: Ranks that share parameters.

    Returns:
        None for `full`, and for a rank that is in no row or alone in it: torch's own way.

    Raises:
        ConfigError: on every rank, if two levels cannot be made of the rows.
    """
    if kind == "full" or len(rows[0]) == 1:
        return None
    rows = [sorted(row) for row in rows]
    rank = dist.get_rank()
    if kind == "int8":
        group = _own_group(rows)
        return None if group is None else CompressedReduceScatter([Hop(group, INT8)])
    nodes = _nodes()
    tables = [ranks_by_node(row, nodes) for row in rows]
    inside = _own_group([places for table in tables for places in table])
    across = _own_group([list(same) for table in tables for same in zip(*table, strict=True)])
    hops = [Hop(group, codec) for group, codec in ((inside, INT8), (across, INT4)) if group]
    for row, table in zip(rows, tables, strict=True):
        if rank in row:
            order = [row.index(there) for same in zip(*table, strict=True) for there in same]
            return CompressedReduceScatter(hops, order)
    return None


def _own_group(groups: list[list[int]]) -> dist.ProcessGroup | None:
    """None for a rank that is in none of them, or alone."""
    mine, _ = dist.new_subgroups_by_enumeration(groups)
    return mine if mine is not None and mine.size() > 1 else None


def _nodes() -> list[str]:
    """For each rank, the address from which it reaches the first: one for all ranks of a node."""
    found: list[str] = [""] * dist.get_world_size()
    first = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)
    family, kind, _, _, address = first[0]
    with socket.socket(family, kind) as towards_first:
        # Nothing is sent: to connect a datagram socket only looks the way up.
        towards_first.connect(address)
        dist.all_gather_object(found, towards_first.getsockname()[0])
    return found
