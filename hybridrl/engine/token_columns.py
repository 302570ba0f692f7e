"""Columns of a batch as the loss reads them: a number for each response token."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.core.batch import Batch, Ragged


def token_places(cu_seqlens: Tensor, rows: list[int]) -> Tensor:
    """Where the tokens of these rows lie in a ragged column's values, row after row."""
    starts, lengths = cu_seqlens[:-1][rows], cu_seqlens.diff()[rows]
    shift = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)


def token_columns(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """Every numeric column as `[response tokens]` on the device: token-level columns as they are,
    per-sample numbers repeated over the sample's tokens."""
    lengths = torch.from_numpy(batch.lengths("response_ids"))
    columns: dict[str, Tensor] = {}
    for name in batch.columns:
        values = batch[name]
        if isinstance(values, Tensor):
            columns[name] = values.repeat_interleave(lengths).to(device)
        elif isinstance(values, Ragged) and torch.equal(values.lengths, lengths):
            columns[name] = values.values.to(device)
    return columns
