"""Where an update that came to nothing first had a number that is not finite, as this rank sees it.

Looked for only when the norm of the gradient is not finite, for it reads everything.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridrl.batch.arrow_columns import Ragged
from hybridrl.batch.batch import Batch
from hybridrl.batch.call_record import COLUMN, GRADIENT, LOSS, WEIGHT, Fault


def fault_of_batch(batch: Batch, loss: float) -> Fault | None:
    """Of the rows that this rank learned from, or else of their loss.

    Args:
        loss: Of this rank's rows.
    """
    mask = batch["response_mask"].values.bool() if "response_mask" in batch else None
    for name in batch.columns:
        values = batch[name]
        is_ragged = isinstance(values, Ragged)
        numbers = values.values if is_ragged else values
        if not isinstance(numbers, Tensor) or not numbers.is_floating_point():
            continue
        wrong = ~torch.isfinite(numbers)
        if is_ragged and mask is not None and len(mask) == len(wrong):
            wrong &= mask  # what is not learned from may be anything
        if wrong.any():
            place = int(wrong.nonzero()[0])
            if is_ragged:
                place = int(torch.searchsorted(values.cu_seqlens, place, right=True)) - 1
            return Fault(COLUMN, f"the column `{name}`, row {place} of its {len(batch)}")
    return None if math.isfinite(loss) else Fault(LOSS, "its loss")


def fault_of_model(model: nn.Module) -> Fault | None:
    """Of the first parameter of those that this rank holds, or else of the first gradient."""
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            return Fault(WEIGHT, f"the weight `{name}` itself")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not _is_finite(parameter.grad):
            return Fault(GRADIENT, f"the gradient of `{name}`")
    return None


def _is_finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(torch.isfinite(local).all())
