"""FSDP2's all-gather of weights as differences of 4 bits to a copy that every rank keeps."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hybridrl.compress.grouped_integers import GroupedIntegerCodec
from hybridrl.parallel.compressed_collectives import PlainAllocation

DIFFERENCE_CODEC = GroupedIntegerCodec(4, 512)


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
