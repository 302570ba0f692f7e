"""Executing a plan whose ranks all live in one process."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybridrl.core.layout import Plan
from hybridrl.reshard.parcels import (
    DEFAULT_BUCKET_BYTES,
    Read,
    Traffic,
    Write,
    bucket_elements,
    copy,
    count,
)


def reshard_in_process(
    plan: Plan,
    reads: Mapping[int, Read],
    writes: Mapping[int, Write],
    dtype: torch.dtype,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> dict[int, Traffic]:
    """Brings values from tensor to tensor, with no buffer unless they must be cast.

    Args:
        reads, writes: By rank; see `reshard.collectives.Reshard`.
        bucket_bytes: Most memory for a cast.

    Returns:
        By rank that has a part in the plan, what separate processes would have counted.
    """
    bucket = bucket_elements(bucket_bytes, dtype)
    for move in (*plan.copies, *plan.moves):
        copy([move], reads[move.sender], writes[move.receiver], dtype, bucket)
    return count(plan, dtype, bucket_bytes)
