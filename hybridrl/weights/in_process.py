"""Executing a plan whose ranks all live in one process."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybridrl.layout.tensor_layout import Plan
from hybridrl.system.device_traits import message_bytes
from hybridrl.weights.transfer_rounds import count, room_of
from hybridrl.weights.weight_transport import Read, Traffic, Write, copy


def reshard_in_process(
    plan: Plan,
    reads: Mapping[int, Read],
    writes: Mapping[int, Write],
    dtype: torch.dtype,
    bucket_bytes: int | None = None,
) -> dict[int, Traffic]:
    """Brings values from tensor to tensor, with no buffer unless they must be cast.

    Args:
        reads, writes: By rank; see `weights.collective_reshard.Reshard`.
        bucket_bytes: Four times the most memory for a cast; None: what suits CPUs.

    Returns:
        By rank that has a part in the plan, what separate processes would have counted.
    """
    bucket_bytes = message_bytes("cpu") if bucket_bytes is None else bucket_bytes
    room = room_of(bucket_bytes, dtype)
    for move in (*plan.copies, *plan.moves):
        for receiver in move.receivers:
            copy([move], reads[move.sender], writes[receiver], dtype, room)
    return count(plan, dtype, bucket_bytes)
