"""Batch: the table of samples that every part of HybridRL speaks.

One row per sample, named columns, held in Arrow. A token-level column is a ragged list (values and
offsets), so nothing is ever padded in memory, on the wire or on disk. Numeric columns are views of
the Arrow buffers: reading one copies nothing, and because the buffers may lie in shared memory,
the tensors must not be written in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hybridrl.errors import DataError, nearest

_TOKENS = ("_ids", "_mask", "_log_probs")
_TRAINERS = ("group_id", "policy_version")


class Ragged(NamedTuple):
    """A column of lists: `values` `[tokens]`, and `cu_seqlens` `[rows + 1]` with row i at
    `values[cu_seqlens[i]:cu_seqlens[i + 1]]`."""

    values: torch.Tensor
    cu_seqlens: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """Number of values of each row, `[rows]`."""
        return self.cu_seqlens.diff()

    def rows(self) -> list[torch.Tensor]:
        """One view per row."""
        return list(torch.split(self.values, self.lengths.tolist()))


class Batch:
    """An immutable table of samples.

    `batch["scores"]` gives a tensor, `batch["response_ids"]` a `Ragged`, `batch["answer"]` a list
    of strings. Every operation returns a new batch that shares the old one's buffers.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Batch:
        """Builds a batch from tensors, arrays, `Ragged`s, lists of 1-D tensors, or plain lists.

        Raises:
            DataError: if the columns do not have one length; names the column.
        """
        arrays = {name: _to_arrow(values) for name, values in columns.items()}
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"The columns of a batch must have one length, these differ: {sizes}.")
        return cls(pa.table(arrays))

    @property
    def columns(self) -> list[str]:
        """Column names, in order."""
        return list(self.table.column_names)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows of this batch, shared buffers beyond them not counted."""
        return int(self.table.nbytes)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __contains__(self, name: object) -> bool:
        return name in self.table.column_names

    def __reduce__(self) -> tuple[type[Batch], tuple[pa.Table]]:
        table = self.table
        if table.nbytes < 0.9 * table.get_total_buffer_size():
            table = table.take(np.arange(len(self)))  # a slice: pickle would send the rest as well
        return Batch, (table,)

    def __repr__(self) -> str:
        fields = ", ".join(f"{field.name}: {field.type}" for field in self.table.schema)
        return f"Batch({len(self)} rows; {fields})"

    def array(self, name: str) -> pa.Array:
        """The column as one Arrow array."""
        if name not in self:
            raise DataError(
                f"The batch has no column `{name}`; it has {', '.join(self.columns)}."
                + nearest(name, self.columns)
            )
        column = self.table.column(name)
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()

    def __getitem__(self, name: str) -> Any:
        array = self.array(name)
        if pa.types.is_large_list(array.type) and _is_number(array.type.value_type):
            offsets = _to_torch(array.offsets)
            return Ragged(_to_torch(array.flatten()), offsets - offsets[0])
        if _is_number(array.type):
            return _to_torch(array)
        return array.to_pylist()

    def ragged(self, name: str) -> Ragged:
        """The token-level column `name`; a `DataError` if it holds one value per row."""
        column = self[name]
        if not isinstance(column, Ragged):
            raise DataError(f"The column `{name}` holds one value per sample, not one per token.")
        return column

    def lengths(self, name: str) -> npt.NDArray[np.int64]:
        """Number of values in each row of the token-level column `name`, `[rows]`."""
        return np.asarray(self.ragged(name).lengths.numpy(), dtype=np.int64)

    def padded(self, name: str, fill: float = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The column as `[rows, longest]`, left-aligned, and the bool mask of its real values."""
        values, cu_seqlens = self.ragged(name)
        lengths = cu_seqlens.diff()
        longest = int(lengths.max()) if len(lengths) else 0
        mask = torch.arange(longest)[None, :] < lengths[:, None]
        dense = torch.full(mask.shape, fill, dtype=values.dtype)
        dense[mask] = values
        return dense, mask

    def select(self, names: Iterable[str]) -> Batch:
        """Only these columns."""
        names = list(names)
        for name in names:
            self.array(name)
        return Batch(self.table.select(names))

    def with_columns(self, columns: Mapping[str, Any]) -> Batch:
        """This batch with the columns added; a column of the same name is replaced."""
        return self | Batch.from_columns(columns)

    def __or__(self, other: Batch) -> Batch:
        """Joins two batches row by row; the right one wins where both have a column."""
        if len(self) != len(other):
            raise DataError(
                f"Only batches of equally many rows join row by row: {len(self)} and {len(other)}."
            )
        merged = {name: self.table.column(name) for name in self.columns}
        merged |= {name: other.table.column(name) for name in other.columns}
        return Batch(pa.table(merged))

    def take(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        """The rows with these numbers, in this order. Consecutive rows are not copied."""
        rows = np.asarray(indices, dtype=np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self):
            raise DataError(f"Rows {rows.min()} to {rows.max()} of a batch of {len(self)} rows.")
        if len(rows) and (np.diff(rows) == 1).all():
            return self.slice(int(rows[0]), int(rows[-1]) + 1)
        return Batch(self.table.take(pa.array(rows)).combine_chunks())

    def slice(self, start: int, stop: int) -> Batch:
        """Rows `start` to `stop` (exclusive), without copying."""
        return Batch(self.table.slice(start, stop - start))

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """One batch after the other; all must have the same columns."""
        if len(batches) == 1:
            return batches[0]
        tables = [batches[0].table, *(b.table.select(batches[0].columns) for b in batches[1:])]
        return Batch(pa.concat_tables(tables, promote_options="permissive").combine_chunks())

    def to_pylist(self) -> list[dict[str, Any]]:
        """One dictionary per row."""
        return list(self.table.to_pylist())

    def rows_for_users(self) -> list[dict[str, Any]]:
        """One dictionary per row, of the columns that are the business of a user's function: not
        those of tokens, nor the trainer's own."""
        hidden = [name for name in self.columns if name.endswith(_TOKENS) or name in _TRAINERS]
        return list(self.table.drop_columns(hidden).to_pylist())

    def write_parquet(self, path: Path) -> None:
        """Writes the rows as they are; pandas, polars and DuckDB read the file."""
        pq.write_table(self.table, path)

    @classmethod
    def read_parquet(cls, path: Path) -> Batch:
        """Reads a file that `write_parquet` wrote."""
        return cls(pq.read_table(path))


def _is_number(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type))


def _to_torch(array: pa.Array) -> torch.Tensor:
    with warnings.catch_warnings():  # torch warns that the shared buffer is read-only
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array.to_numpy(zero_copy_only=False))


def _to_numpy(values: torch.Tensor | npt.NDArray[Any]) -> npt.NDArray[Any]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
        values = values.numpy()
    # Arrow packs booleans into bits, which torch cannot view: masks travel as bytes.
    return values.astype(np.uint8) if values.dtype == np.bool_ else values


def _to_arrow(values: Any) -> pa.Array:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, Ragged):
        offsets = _to_numpy(values.cu_seqlens).astype(np.int64)
        return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(_to_numpy(values.values)))
    if isinstance(values, torch.Tensor | np.ndarray):
        return pa.array(_to_numpy(values))
    values = list(values)
    if values and all(isinstance(row, torch.Tensor | np.ndarray) for row in values):
        offsets = np.cumsum([0, *(len(row) for row in values)], dtype=np.int64)
        flat = np.concatenate([_to_numpy(row) for row in values])
        return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat))
    if values and all(isinstance(row, list) for row in values):
        return _list_column(values)
    return pa.array(values)


def _list_column(rows: list[list[Any]]) -> pa.Array:
    flat = [value for row in rows for value in row]
    if any(not isinstance(value, int | float) for value in flat):
        return pa.array(rows)
    kind = np.int64 if all(isinstance(value, int) for value in flat) else np.float32
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.asarray(flat, dtype=kind)))
