"""Where an update that came to nothing first had a number that is not finite, as this rank sees it.

Looked for only when the norm of the gradient is not finite, for it reads everything.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridrl.core.batch import Batch
from hybridrl.core.columns import Ragged
from hybridrl.core.record import Fault

COLUMN, LOSS, GRADIENT = 0, 1, 2


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


def fault_of_gradients(model: nn.Module) -> Fault | None:
    """Of the first parameter that has one, of those that this rank holds."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if not torch.isfinite(local).all():
            return Fault(GRADIENT, f"the gradient of `{name}`")
    return None
