"""Which samples are right: one answer for figures, evaluations, samplers and programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hybridrl.batch.batch import Batch

OUTCOMES = "outcomes"
"""The column of scores without the rewards of steps."""


def outcomes_of(batch: Batch) -> Tensor:
    """The outcome of each sample, NaN where it was dropped: its score without rewards of steps,
    lengths or shaping. Where a worker of the user's gives scores only, these."""
    found: Tensor = batch[OUTCOMES if OUTCOMES in batch else "scores"]
    return found


def is_right(outcomes: float | Tensor | npt.NDArray[Any], correct_at: float) -> Any:
    """Whether outcomes are `correct_at` or more, of the same shape; NaN is not.

    Outcomes have 32 bits, in which 0.7 is a little less than Python's 0.7: so has the bound.
    """
    return outcomes >= float(np.float32(correct_at))
