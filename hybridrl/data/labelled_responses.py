"""Tokenizing responses that are marked as good or bad."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch

from hybridrl.batch.batch import Batch
from hybridrl.data.preference_pairs import split_pairs_into_samples, tokenize_preference_pairs
from hybridrl.data.row_reader import RowReader
from hybridrl.data.supervised_tokens import tokenize_examples


def tokenize_labelled_responses(
    reader: RowReader, rows: pa.Table, prompt_column: str, response_column: str, label_column: str
) -> Batch:
    """Tokenize prompts with a response and a label, true or false.

    Returns:
        The columns of `tokenize_examples`, and `label` (float32), 1 for good responses, else 0.

    Raises:
        DataError, ConfigError: as `tokenize_examples` does, and for a label that is neither true
            nor false; names the row.
    """

    def parse(value: Any) -> float | None:
        return float(value) if value in (0, 1) else None  # also false and true

    expected = "true or false"
    found = reader.values(rows, label_column, "label_column", parse, expected, "without a label")
    labels = np.array([v or 0.0 for v in found], dtype=np.float32)
    return tokenize_examples(reader, rows, prompt_column, response_column, {"label": labels})


def tokenize_unpaired_responses(
    reader: RowReader,
    rows: pa.Table,
    prompt_column: str | None,
    chosen_column: str,
    rejected_column: str,
) -> Batch:
    """Tokenize both responses of preference pairs, of which the chosen one is good.

    Returns:
        The columns of `tokenize_labelled_responses`, with two rows for each pair.

    Raises:
        DataError, ConfigError: as `tokenize_preference_pairs` does.
    """
    columns = (prompt_column, chosen_column, rejected_column)
    pairs = tokenize_preference_pairs(reader, rows, *columns)
    samples = split_pairs_into_samples(pairs)
    samples = Batch(samples.table.drop_columns(["margin"]))
    return samples.with_columns({"label": torch.tensor([1.0, 0.0]).repeat(len(pairs))})
