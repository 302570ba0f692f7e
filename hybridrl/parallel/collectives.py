"""Collectives that torch.distributed does not have: differentiable copies, sums, gathers and
splits, an exchange of rows, sums and maxima of ranks that may be alone, a gather that sends equal
objects once, and the making of groups."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.models.linear_map import apply_linear_map

_apply = torch.compiler.disable(apply_linear_map)


def copy_to_region(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `x`, which is equal on every rank and used differently by each; its gradients are
    summed in the backward."""
    return _apply(x, _same, partial(_sum, group=group))


def reduce_from_region(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of every rank's `x`, which all ranks use alike; the gradient passes through
    unchanged."""
    return _apply(x, partial(_sum, group=group), _same)


def gather_tokens(x: torch.Tensor, group: dist.ProcessGroup, *, summed: bool) -> torch.Tensor:
    """Return the states of all tokens, `[1, tokens, width]`, of which every rank has equally many.

    Args:
        summed: Each rank uses them differently, so their gradients are summed in the backward; else
            all use them alike.
    """
    gather, take = partial(_gather_rows, group=group), partial(_take_rows, group=group)
    return _apply(x, gather, partial(take, summed=summed))


def split_tokens(x: torch.Tensor, group: dist.ProcessGroup, *, summed: bool) -> torch.Tensor:
    """Return the states of this rank's tokens, of `[1, tokens, width]`.

    Args:
        summed: Of the sum of every rank's `x`; else `x` is equal on all ranks.
    """
    gather, take = partial(_gather_rows, group=group), partial(_take_rows, group=group)
    return _apply(x, partial(take, summed=summed), gather)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def _gather_rows(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows of all ranks, `[1, rows, width]`, one rank's after the other's."""
    whole = x.new_empty(group.size() * x.shape[1], x.shape[2])
    dist.all_gather_into_tensor(whole, x[0].contiguous(), group=group)
    return whole[None]


def _take_rows(x: torch.Tensor, group: dist.ProcessGroup, summed: bool) -> torch.Tensor:
    """Return this rank's rows of `[1, rows, width]`: of the sum of every rank's `x`, or of `x`."""
    if not summed:
        return x.chunk(group.size(), 1)[group.rank()].contiguous()
    mine = x.new_empty(x.shape[1] // group.size(), x.shape[2])
    reduce_scatter_tensor(mine, x[0].contiguous(), dist.ReduceOp.SUM, group)
    return mine[None]


def reduce_scatter_tensor(
    out: torch.Tensor, values: torch.Tensor, op: Any, group: dist.ProcessGroup
) -> None:
    """Call torch's own reduce-scatter under the name that it has in this version."""
    named = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    named(out, values, op=op, group=group)


def exchange_rows(
    values: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send `sent[r]` rows to each rank r, and return the `received[r]` rows from each."""
    arrived = values.new_empty(sum(received), *values.shape[1:])
    dist.all_to_all_single(arrived, values.contiguous(), received, sent, group=group)
    return arrived


def reduce_over(
    group: dist.ProcessGroup | None, values: torch.Tensor, operation: Any = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Reduce a tensor of each rank to one that all have, in place, and return it. Collective.

    Args:
        group: None: this rank is alone.
    """
    if group is not None:
        dist.all_reduce(values, operation, group=group)
    return values


def make_own_group(groups: Iterable[Iterable[int]]) -> dist.ProcessGroup | None:
    """Make a process group for each of these groups of ranks and return this rank's; None if it is
    in none of them, or alone. Collective over the current world."""
    every = [list(ranks) for ranks in groups]
    if all(len(ranks) == 1 for ranks in every):
        return None
    mine, _ = dist.new_subgroups_by_enumeration(every)
    return mine if mine is not None and mine.size() > 1 else None


DIGEST_BYTES = 32


def all_gather_distinct(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's value, in the order of ranks; equal values are sent once and are one
    object. Collective.

    Of a thousand ranks few differ in what they generate with, and none in the names of a stage's
    parameters; a thousand copies would take seconds to read, and gigabytes.
    """
    said = pickle.dumps(value)
    mine = torch.frombuffer(bytearray(hashlib.sha256(said).digest()), dtype=torch.uint8)
    digests = torch.empty(group.size() * DIGEST_BYTES, dtype=torch.uint8)
    dist.all_gather_into_tensor(digests, mine, group=group)
    found: dict[bytes, Any] = {}
    order = [bytes(digest.tolist()) for digest in digests.view(-1, DIGEST_BYTES)]
    for rank, digest in enumerate(order):
        if digest not in found:
            here = [value]
            dist.broadcast_object_list(here, group=group, group_src=rank)
            found[digest] = here[0]
    return [found[digest] for digest in order]
