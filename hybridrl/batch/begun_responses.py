"""Responses that later generations continue: the columns that say how far each is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybridrl.batch.arrow_columns import RaggedColumn
from hybridrl.batch.batch import Batch
from hybridrl.batch.kept_sets import KEPT_SETS, restricts_sampling

UNFINISHED = "unfinished"
"""The finish reason of a sample that goes on in a later generation."""
BEGUN_COLUMNS = (
    *("response_ids", "rollout_log_probs", "token_versions", "finish_reason", "carried"),
)
"""The columns of a row that a generation continues: what there is of its response, and how often it
was kept."""


def list_begun_columns(sampling: Any) -> tuple[str, ...]:
    """Return `BEGUN_COLUMNS`, with `kept_sets` where sampling with these settings makes them."""
    return (*BEGUN_COLUMNS, *([KEPT_SETS] if restricts_sampling(sampling) else []))


def begin_rows(count: int) -> Batch:
    """Return the columns of rows whose response has not begun: those of `list_begun_columns`, and
    `kept_sets`."""
    bounds = torch.zeros(count + 1, dtype=torch.int64)
    tokens = RaggedColumn(torch.empty(0, dtype=torch.int64), bounds)
    return Batch.from_columns(
        {
            "response_ids": tokens,
            "rollout_log_probs": RaggedColumn(torch.empty(0, dtype=torch.float32), bounds),
            "token_versions": tokens,
            "finish_reason": [UNFINISHED] * count,
            "carried": torch.zeros(count, dtype=torch.int64),
            KEPT_SETS: RaggedColumn(torch.empty(0, dtype=torch.int32), bounds),
        }
    )


def find_complete_groups(
    groups: Sequence[Hashable], finish_reasons: Sequence[str]
) -> npt.NDArray[np.bool_]:
    """Return for each row whether all rows of its group are finished."""
    pairs = zip(groups, finish_reasons, strict=True)
    lacking = {group for group, reason in pairs if reason == UNFINISHED}
    return np.array([group not in lacking for group in groups], dtype=np.bool_)
