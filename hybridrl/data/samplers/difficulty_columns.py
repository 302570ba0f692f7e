"""Difficulty columns of the data, and rows ranked and grouped by them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import SOURCE_COLUMN, Batch
from hybridrl.errors import ConfigError, suggest_name

DIFFICULTY_PREFIX = "difficulty_"
"""How columns of the data begin that say how hard a row is, if no others are named."""
MAX_RANKS = 16
"""A number with more different values than this counts by its rank, in so many parts."""


def find_difficulty_columns(rows: Batch, named: Sequence[str] | str | None) -> list[str]:
    """Return the difficulty columns: the named ones, or those that begin with `DIFFICULTY_PREFIX`.

    Raises:
        ConfigError: if the data lacks one.
    """
    if named is None:
        return [name for name in rows.columns if name.startswith(DIFFICULTY_PREFIX)]
    names = [named] if isinstance(named, str) else list(named)
    for name in names:
        if name not in rows.columns:
            raise ConfigError(
                f"data.sampler_options.columns names `{name}`, and the data has no such column; it "
                f"has {', '.join(rows.columns)}.{suggest_name(name, rows.columns)}"
            )
    return names


def rank_values(rows: Batch, column: str) -> npt.NDArray[np.int64]:
    """Rank each row's value among the distinct values of a column, from 0; numbers with more
    than `MAX_RANKS` values are binned by quantile, missing values are -1."""
    cells = rows.table.column(column).to_pylist()
    numbers = np.array([_read_number(cell) for cell in cells])
    if np.isnan(numbers).all():  # texts, in their order
        texts = sorted({str(cell) for cell in cells if cell is not None})
        places = {text: place for place, text in enumerate(texts)}
        return np.array([-1 if c is None else places[str(c)] for c in cells], np.int64)
    there = ~np.isnan(numbers)
    values = np.unique(numbers[there])
    if len(values) > MAX_RANKS:
        shares = np.linspace(0, 1, MAX_RANKS + 1)[1:-1]
        values = np.unique(np.quantile(numbers[there], shares))
        found = np.searchsorted(values, numbers, side="right")
    else:
        found = np.searchsorted(values, numbers)
    return np.where(there, found, -1).astype(np.int64)


def assign_buckets(rows: Batch, columns: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return a bucket number for each row, from 0; rows of the same source and difficulty share
    one."""
    named = [*([SOURCE_COLUMN] if SOURCE_COLUMN in rows.columns else []), *columns]
    if not named:
        return np.zeros(len(rows), np.int64)
    table = np.stack([rank_values(rows, name) for name in named], axis=1)
    return np.unique(table, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _read_number(cell: object) -> float:
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return float(cell)
    return np.nan
