"""Samples of one evaluation, as a table and as arrays by prompt and sample."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_REQUIRED_COLUMNS = ("row", "key", "sample", "greedy", "score", "correct")
"""Columns without which a table is none of samples."""


@dataclass(frozen=True)
class SampleArrays:
    """The samples of n prompts as arrays, k for each prompt.

    Attributes:
        scores: `[n, k]`, NaN: the sample could not be scored.
        correct: `[n, k]`.
        tokens: `[n, k]`, sampled ones.
        truncated: `[n, k]`, 1 where `max_tokens` ended it.
        extracted: The answer that each gives; None: none.
    """

    scores: npt.NDArray[np.float64]
    correct: npt.NDArray[np.bool_]
    tokens: npt.NDArray[np.float64]
    truncated: npt.NDArray[np.float64]
    extracted: list[list[str | None]]


class SampleTable:
    """A table of the samples of an evaluation set.

    Args:
        table: A line for each sample, with `row` (number of the prompt), its `key`, `sample` (its
            number among those of the prompt), `greedy`, `prompt`, `answer`, `response`,
            `extracted`, `score`, `correct`, `tokens`, `finish_reason`, and further columns.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    @classmethod
    def read(cls, path: Path) -> SampleTable | None:
        """Read the table of an earlier evaluation; None if the file is missing or no sample
        table."""
        from pyarrow import parquet

        try:
            table = parquet.read_table(path)
        except (OSError, pa.ArrowException):
            return None
        return cls(table) if set(_REQUIRED_COLUMNS) <= set(table.column_names) else None

    @cached_property
    def greedy(self) -> SampleArrays | None:
        """The greedy response to each prompt; None if there are none."""
        return self._answers(True)

    @cached_property
    def sampled(self) -> SampleArrays | None:
        """The sampled responses; None if there are only greedy ones."""
        return self._answers(False)

    @cached_property
    def keys(self) -> list[str]:
        """Return the keys that identify the prompts across evaluations; see
        `scored_samples.compute_prompt_keys`."""
        return self.column("key")

    def column(self, name: str) -> list[Any]:
        """Return the value of a data column for each prompt."""
        values = self.table.column(name).to_pylist()
        return [values[index] for index in self._rows_of(self.sampled is None)[:, 0]]

    def _rows_of(self, greedy: bool) -> npt.NDArray[np.int64]:
        """Return the table's line numbers as `[n, k]`; `[0, 0]` if there are no such samples."""
        lines = np.flatnonzero(self._numbers("greedy") == greedy)
        rows, samples = self._numbers("row")[lines], self._numbers("sample")[lines]
        ordered: npt.NDArray[np.int64] = lines[np.lexsort((samples, rows))]
        prompts = len(np.unique(rows))
        return ordered.reshape(prompts, -1) if prompts else ordered.reshape(0, 0)

    def _answers(self, greedy: bool) -> SampleArrays | None:
        lines = self._rows_of(greedy)
        if not lines.size:
            return None
        extracted = self._texts("extracted")
        reasons = np.asarray(self._texts("finish_reason"), dtype=object)
        return SampleArrays(
            self._numbers("score")[lines],
            self._numbers("correct")[lines] > 0,
            self._numbers("tokens")[lines],
            (reasons == "length").astype(np.float64)[lines],
            [[extracted[index] for index in row] for row in lines],
        )

    def _numbers(self, name: str) -> npt.NDArray[np.float64]:
        if name not in self.table.column_names:
            return np.full(self.table.num_rows, np.nan)
        return np.asarray(self.table.column(name).cast(pa.float64()).to_numpy())

    def _texts(self, name: str) -> list[Any]:
        if name not in self.table.column_names:
            return [None] * self.table.num_rows
        return list(self.table.column(name).to_pylist())
