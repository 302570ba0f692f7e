"""Compressed collectives for FSDP2: encoded gradients summed in float32 where they arrive, and
weights gathered as differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.compress.grouped_integers import GroupedIntegerCodec

INT8_CODEC = GroupedIntegerCodec(8, 512)
INT4_CODEC = GroupedIntegerCodec(4, 128, hadamard=True)
"""What SDP4Bit takes within a node and between nodes."""
DIFFERENCE_CODEC = GroupedIntegerCodec(4, 512)


@dataclass(frozen=True)
class ReductionHop:
    """An exchange over some ranks after which each has the sum of its own part.

    Args:
        group: These ranks.
        codec: Of what travels; a rank's own part stays as it is. None: float32 as it is.
    """

    group: dist.ProcessGroup
    codec: GroupedIntegerCodec | None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of the part that belongs to this rank.

        Args:
            values: Float32, flat: as many equal parts as there are ranks, in their order.

        Returns:
            Flat. Parts are added in the order of the ranks, so that it is the same every time.
        """
        rank, parts = self.group.rank(), values.view(self.group.size(), -1)
        numel = parts.shape[1]
        if self.codec is None:
            arrived = torch.empty_like(values)
            dist.all_to_all_single(arrived, values.contiguous(), group=self.group)
            return _sum(arrived.view_as(parts))
        sizes = [self.codec.size(numel)] * len(parts)
        sizes[rank] = 0
        sent, received = torch.empty(2, sum(sizes), dtype=torch.uint8, device=values.device)
        for part, out, size in zip(parts, sent.split(sizes), sizes, strict=True):
            if size:
                self.codec.encode(part, out)
        dist.all_to_all_single(received, sent, sizes, sizes, group=self.group)
        codec = self.codec
        return _sum(
            parts[rank] if number == rank else codec.decode(encoded, numel, torch.float32)
            for number, encoded in enumerate(received.split(sizes))
        )


def _sum(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sum parts in their order with one of them in memory at a time."""
    coming = iter(parts)
    total = next(coming).clone()
    for part in coming:
        total += part
    return total


class PlainAllocation:
    """The part of FSDP2's custom collectives that allocates: ordinary memory of the device."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate memory for what is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)


class CompressedReduceScatter(PlainAllocation):
    """A reduce-scatter of gradients in one or two hops, for FSDP2's `set_custom_reduce_scatter`.
    Source: SDP4Bit, arXiv 2410.15526, section 3.2. Unlike there, only the second hop has the
    Hadamard transform, since integers of 8 bits gain little by it.

    What is lost is lost: there is no feedback of errors, which would take a float32 copy of all
    gradients on each rank. A gradient that is not finite arrives as one.

    Args:
        hops: One over all ranks; or one over the ranks of each node, then one over the ranks that
            have the same place on all nodes.
        order: Of the ranks' parts before the first hop, as their numbers; None: as they are. With
            two hops: for each place on a node, for each node, the rank there.
    """

    def __init__(self, hops: Sequence[ReductionHop], order: Sequence[int] | None = None) -> None:
        self.hops = hops
        self.order = order

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce and scatter as `torch.distributed.reduce_scatter_tensor` does; done on the current
        stream when it returns."""
        assert op == dist.ReduceOp.SUM, "`fsdp.shard` has gradients summed"
        values = input_tensor
        if self.order is not None:
            parts = values.view(len(self.order), -1)
            values = torch.cat([parts[number] for number in self.order])
        for hop in self.hops:
            values = hop.sum(values)
        output_tensor.copy_(values)


def apply_encoded_difference(held: torch.Tensor, encoded: torch.Tensor) -> None:
    """Add the decoded difference `wanted - held` to `held`, in place.

    Args:
        held: What it has: flat, of any precision. It is added to in float32 and rounded once, so
            all receivers with the same bits before have the same bits after.
    """
    change = DIFFERENCE_CODEC.decode(encoded, held.numel(), torch.float32)
    held.copy_(change.add_(held))


class DifferenceAllGather(PlainAllocation):
    """An all-gather of one FSDP unit's weights as differences, for FSDP2's `set_custom_all_gather`.
    Source: SDP4Bit, arXiv 2410.15526, section 3.1 (qWD).

    The first gather is in full, and all ranks keep what came, in the precision of computation: a
    unit's memory for good, where FSDP frees it (ZeRO-2's). After an optimizer step each rank sends
    what its weights are now less what the others have of them. Since that is the difference, what
    4 bits lose of it is part of the next one, and nothing adds up. All other gathers, of further
    micro-batches, of backwards and of scoring, take the copy and send nothing.

    A weight that is not finite makes its group NaN on all ranks, until weights are gathered anew.
    """

    def __init__(self) -> None:
        self._held: torch.Tensor | None = None
        self._is_behind = False

    def weights_stepped(self) -> None:
        """Mark the weights as changed by the optimizer, so that the next gather sends differences.
        Call it on every rank."""
        self._is_behind = True

    def begin_anew(self) -> None:
        """Drop the copy, so that the next gather is in full, after weights were loaded. Call it on
        every rank."""
        self._held = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather as `torch.distributed.all_gather_into_tensor` does; done on the current stream
        when it returns."""
        if self._held is None:
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
            self._held = output_tensor.clone()
        else:
            if self._is_behind:
                self._send_differences(self._held, input_tensor, group)
            output_tensor.copy_(self._held)
        self._is_behind = False

    def _send_differences(
        self, held: torch.Tensor, wanted: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        """Exchange encoded differences and apply them to the copy, this rank's own part included,
        so that all ranks have the same bits."""
        parts = held.view(group.size(), -1)
        encoded = DIFFERENCE_CODEC.encode(wanted.float() - parts[group.rank()])
        received = encoded.new_empty(group.size() * len(encoded))
        dist.all_gather_into_tensor(received, encoded, group=group)
        for part, its in zip(parts, received.view(group.size(), -1), strict=True):
            apply_encoded_difference(part, its)
