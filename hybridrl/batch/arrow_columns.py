"""Conversions between the columns of a batch in Arrow and tensors, ragged columns and lists."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from hybridrl.batch.read_only import make_read_only


class RaggedColumn(NamedTuple):
    """A column with a list of numbers per row: `values` `[tokens]`, and `cu_seqlens` `[rows + 1]`
    with row i at `values[cu_seqlens[i]:cu_seqlens[i + 1]]`."""

    values: torch.Tensor
    cu_seqlens: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """The number of values of each row, `[rows]`."""
        return self.cu_seqlens.diff()

    def rows(self) -> list[torch.Tensor]:
        """Return one view of `values` per row."""
        rows = torch.split(self.values.as_subclass(torch.Tensor), self.lengths.tolist())
        # One by one, for many rows are many times the price of a read-only tensor's `split`.
        is_plain = type(self.values) is torch.Tensor
        return list(rows) if is_plain else [row.as_subclass(type(self.values)) for row in rows]


def is_numeric_type(arrow_type: pa.DataType) -> bool:
    """Return whether a column of this Arrow type is read as a tensor."""
    return bool(pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type))


def is_ragged_type(arrow_type: pa.DataType) -> bool:
    """Return whether a column of this Arrow type is read as a `RaggedColumn`: lists of numbers. The
    library writes `large_list`; JSON and Parquet files have the other list types."""
    is_list = (
        pa.types.is_large_list(arrow_type)
        or pa.types.is_list(arrow_type)
        or pa.types.is_fixed_size_list(arrow_type)
    )
    return is_list and is_numeric_type(arrow_type.value_type)


def json_column(values: Sequence[Any]) -> pa.Array:
    """A column of lists of objects, kept as JSON: an Arrow struct would give each object the keys
    of all, and each key one type and one place."""
    texts = [None if value is None else json.dumps(value) for value in values]
    return pa.array(texts, pa.json_())


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The values of a column as Python objects, what is kept as JSON included."""
    cells: list[Any] = column.to_pylist()
    if isinstance(column.type, pa.JsonType):
        return [None if cell is None else json.loads(cell) for cell in cells]
    return cells


def to_ragged(array: pa.Array) -> RaggedColumn:
    """Convert an Arrow column of lists of numbers without copying the numbers."""
    if not pa.types.is_large_list(array.type):
        array = array.cast(pa.large_list(array.type.value_type))
    offsets = _plain(array.offsets)
    return RaggedColumn(to_tensor(array.flatten()), offsets - offsets[0])


def to_tensor(array: pa.Array) -> torch.Tensor:
    """Convert an Arrow column of numbers to a read-only tensor without copying it; missing numbers
    are NaN."""
    return make_read_only(_plain(array))


def _plain(array: pa.Array) -> torch.Tensor:
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


def to_arrow(values: Any) -> pa.Array:
    """Convert anything that `Batch.from_columns` takes to an Arrow column; raise pyarrow's errors
    if that is not possible."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, RaggedColumn):
        offsets = _to_numpy(values.cu_seqlens).astype(np.int64)
        return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(_to_numpy(values.values)))
    if isinstance(values, torch.Tensor | np.ndarray):
        return _tensor_column(_to_numpy(values))
    values = list(values)
    if values and all(isinstance(row, torch.Tensor | np.ndarray) for row in values):
        return _rows_column([_to_numpy(row) for row in values])
    if values and all(isinstance(row, list) for row in values):
        return _list_column(values)
    return pa.array(values)


def _tensor_column(values: npt.NDArray[Any]) -> pa.Array:
    if values.ndim == 2:
        rows, width = values.shape
        offsets = np.arange(rows + 1, dtype=np.int64) * width
        return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values.reshape(-1)))
    if values.ndim != 1:
        raise pa.ArrowInvalid(
            f"it has the shape {list(values.shape)}, and a column holds a number for each row, or "
            "a list of numbers. Flatten all but the first dim."
        )
    return pa.array(values)


def _rows_column(rows: list[npt.NDArray[Any]]) -> pa.Array:
    if all(row.ndim == 0 for row in rows):
        return pa.array(np.stack(rows))
    wrong = next((row for row in rows if row.ndim != 1), None)
    if wrong is not None:
        raise pa.ArrowInvalid(
            f"a row has the shape {list(wrong.shape)}, and a row holds a number or a list of "
            "numbers. Flatten it."
        )
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows)))


def _list_column(rows: list[list[Any]]) -> pa.Array:
    flat = [value for row in rows for value in row]
    if any(not isinstance(value, int | float) for value in flat):
        return pa.array(rows)
    kind = np.int64 if all(isinstance(value, int) for value in flat) else np.float32
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.asarray(flat, dtype=kind)))
