"""The reduce-scatter of gradients that `parallel.gradients` selects."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridrl.compress.grouped_integers import GroupedIntegerCodec
from hybridrl.errors import ConfigError
from hybridrl.parallel.collectives import make_own_group
from hybridrl.parallel.compressed_collectives import (
    INT4_CODEC,
    INT8_CODEC,
    CompressedReduceScatter,
    ReductionHop,
)
from hybridrl.parallel.measured_reduction import MeasuredReduceScatter

_AUTO = "auto"
_CODECS: dict[str, GroupedIntegerCodec | None] = {
    "float32": None,
    "int8": INT8_CODEC,
    "int4": INT4_CODEC,
}
_INTRA_NODE_CODECS, _INTER_NODE_CODECS = ("float32", "int8"), ("float32", "int8", "int4")
"""What `auto` may take within a node and between nodes. Not the largest values alone: what they
leave out has to be kept on every rank, four bytes for each gradient of the whole model, which is
the memory that sharding is there to save."""

GradientReduceScatter = CompressedReduceScatter | MeasuredReduceScatter


def make_reduce_scatter(
    kind: str, rows: Sequence[Sequence[int]], device: torch.device | None = None
) -> GradientReduceScatter | None:
    """Build the reduce-scatter that sums gradients over this rank's row of ranks. Collective over
    the default process group.

    Args:
        kind: See `ParallelConfig.gradients`.
        rows: Ranks that share parameters.
        device: This rank's, on which `auto` measures; None: the CPU.

    Returns:
        None for `full` and `bfloat16`, which are torch's own way, and for a rank that is in no row
        or alone in it.

    Raises:
        ConfigError: on every rank, if two levels cannot be made of the rows.
    """
    if kind in ("full", "bfloat16") or len(rows[0]) == 1:
        return None
    rows = [sorted(row) for row in rows]
    if kind == "int8":
        group = make_own_group(rows)
        return None if group is None else CompressedReduceScatter([ReductionHop(group, INT8_CODEC)])
    nodes = _find_node_addresses()
    if kind == _AUTO:
        return _make_measured(rows, nodes, device or torch.device("cpu"))
    levels = _TwoLevelGroups(rows, nodes)
    hops = levels.hops(INT8_CODEC, INT4_CODEC)
    return CompressedReduceScatter(hops, levels.order) if hops else None


class _TwoLevelGroups:
    """The process groups of a two-level reduction: within each node, then between nodes. Building
    them is collective."""

    def __init__(self, rows: Sequence[Sequence[int]], nodes: Sequence[str]) -> None:
        tables = [group_ranks_by_node(row, nodes) for row in rows]
        self.inside = make_own_group(places for table in tables for places in table)
        self.across = make_own_group(
            places for table in tables for places in zip(*table, strict=True)
        )
        self.order: list[int] = []
        for row, table in zip(rows, tables, strict=True):
            if dist.get_rank() in row:
                places = zip(*table, strict=True)
                self.order = [row.index(there) for place in places for there in place]

    def hops(
        self, inside: GroupedIntegerCodec | None, across: GroupedIntegerCodec | None
    ) -> list[ReductionHop]:
        """Return the hops that have more than one rank."""
        both = ((self.inside, inside), (self.across, across))
        return [ReductionHop(group, codec) for group, codec in both if group is not None]


def _make_measured(
    rows: Sequence[Sequence[int]], nodes: Sequence[str], device: torch.device
) -> MeasuredReduceScatter | None:
    """Build the reduce-scatter of `auto` with all its candidates, lossless ones first."""
    group = make_own_group(rows)
    try:
        tables = [group_ranks_by_node(row, nodes) for row in rows]
    except ConfigError:  # nodes with more ranks than others: one hop
        tables = []
    counts = {(len(table), len(table[0])) for table in tables}
    on_nodes, on_each = counts.pop() if len(counts) == 1 else (1, 1)
    levels = _TwoLevelGroups(rows, nodes) if on_nodes > 1 and on_each > 1 else None
    if group is None:
        return None
    one_hop = _INTER_NODE_CODECS if on_nodes > 1 and on_each == 1 else _INTRA_NODE_CODECS
    ways = {name: CompressedReduceScatter([ReductionHop(group, _CODECS[name])]) for name in one_hop}
    if levels is not None:
        for across, inside in itertools.product(_INTER_NODE_CODECS, _INTRA_NODE_CODECS):
            hops = levels.hops(_CODECS[inside], _CODECS[across])
            ways[f"{inside}+{across}"] = CompressedReduceScatter(hops, levels.order)
    return MeasuredReduceScatter(ways, group, device)


def _find_node_addresses() -> list[str]:
    """Return for each rank the address from which it reaches the first rank, which is equal for all
    ranks of a node."""
    found: list[str] = [""] * dist.get_world_size()
    first = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)
    family, kind, _, _, address = first[0]
    with socket.socket(family, kind) as towards_first:
        # Nothing is sent: to connect a datagram socket only looks the way up.
        towards_first.connect(address)
        dist.all_gather_object(found, towards_first.getsockname()[0])
    return found


def group_ranks_by_node(ranks: Sequence[int], nodes: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each node, equally many on each.

    Args:
        ranks: Some ranks of a world, rising.
        nodes: For each rank of the world, its node.

    Raises:
        ConfigError: if some nodes have more of the ranks than others.
    """
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(nodes[rank], []).append(rank)
    counts = {len(one) for one in found.values()}
    if len(counts) > 1:
        said = ", ".join(f"{len(one)} on {node}" for node, one in found.items())
        raise ConfigError(
            "parallel.gradients=two_level_int4 needs as many ranks that share parameters on each "
            f"node, and there are {said}. Set parallel.gradients=int8, or parallel.shards so that "
            "they are equally many."
        )
    return list(found.values())
