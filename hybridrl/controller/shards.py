"""Shards: the pieces of a table, each where it was made, and what is known of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybridrl.batch.batch import Batch
from hybridrl.controller.expected_columns import Columns

COUNTED = ("prompt_ids", "response_ids")
"""The columns whose tokens are balanced over the ranks."""
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShardInfo:
    """What may be known of a shard without fetching it.

    Attributes:
        rows: The numbers of its rows in their table.
        schema: Names and types of its columns.
        tokens: Tokens of each of its `COUNTED` columns by row.
        total: How many rows the table has in all; None: as many as the shards beside it.
        sizes: Bytes of each column.
    """

    rows: Rows
    schema: pa.Schema
    tokens: dict[str, Rows]
    total: int | None = None
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, batch: Batch, rows: Rows, total: int | None = None) -> ShardInfo:
        """Describes `batch` as the shard that holds `rows` of its table."""
        tokens = {name: batch.lengths(name) for name in COUNTED if name in batch}
        sizes = tuple(column.nbytes for column in batch.table.columns)
        return cls(rows, batch.table.schema, tokens, total, sizes)

    def bytes_of(self, rows: int, names: Sequence[str]) -> float:
        """About as many as so many rows of these columns have."""
        wanted = set(names)
        size = sum(
            s for name, s in zip(self.schema.names, self.sizes, strict=True) if name in wanted
        )
        return size * rows / max(1, len(self.rows))


def count_tokens(batch: Batch) -> int:
    """Tokens of the `COUNTED` columns of all rows."""
    return sum(int(batch.lengths(name).sum()) for name in COUNTED if name in batch)


class Shards(ABC):
    """What one call returned: a shard from each rank that answered, in any order of rows.

    Attributes:
        columns: The columns that the call makes, as far as it is known beforehand.
        rows: Rows of the table, if it is known beforehand.
    """

    def __init__(self, columns: Columns, rows: int | None) -> None:
        self.columns = columns
        self.rows = rows

    @abstractmethod
    def infos(self) -> Sequence[ShardInfo]:
        """What the shards say of themselves; waits for the call."""

    @abstractmethod
    def batch(self, index: int) -> Batch:
        """A shard's rows, all of them."""

    def read(self, index: int, rows: Rows, names: Sequence[str]) -> Batch:
        """These columns of these rows of a shard, by their places in it."""
        return self.batch(index).select(names).take(rows)
