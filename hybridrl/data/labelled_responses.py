"""Tokenizing responses that are marked as good or bad."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch

from hybridrl.batch.batch import Batch
from hybridrl.data.preference_pairs import split_pairs_into_samples, tokenize_preference_pairs
from hybridrl.data.row_origin import DataRow
from hybridrl.data.row_reader import RowReader
from hybridrl.data.supervised_tokens import tokenize_examples
from hybridrl.errors import RowError


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

    def read(row: DataRow, value: Any) -> float:
        if value not in (0, 1):  # also false and true
            raise RowError(
                f"{row} has {value!r} in the column `{label_column}` (`{row / 'label_column'}`), "
                "expected true or false.",
                "without a label",
            )
        return float(value)

    found = reader.refused.map(read, reader.cells(rows, label_column, "label_column"))
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
