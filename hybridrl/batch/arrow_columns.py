"""Columns of a batch: Arrow underneath, read as read-only tensors, ragged columns and lists.

A column's memory is shared: with other readers of the same table, and with the object store. Torch
knows no read-only tensors, so a subclass refuses what would write into one.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from hybridrl.errors import DataError

_OPERATORS = (
    *("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_WRITE = {"__setitem__", *(f"__i{name}__" for name in _OPERATORS)}
_WRITE_NOTHING = {"requires_grad_", "share_memory_"}


class ReadOnlyTensor(Tensor):
    """A tensor whose memory must not be written.

    In-place operations on it raise. What shares its memory (views, parts, `detach()`, a `.to()`
    that moves nothing) is read-only too; what has memory of its own is a plain tensor. Pickled or
    saved it is a plain tensor. `as_subclass(torch.Tensor)` gives the plain tensor on the same
    memory, for code that is known not to write. (What goes round torch can still write: the
    storage itself, and `torch.from_numpy`, which does not look whether an array may be written.)
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if _writes(name, args, kwargs):
            raise DataError(
                f"`{name}` would change a column of a batch in place, which others read too. Make "
                "a new tensor (`x = x - y` in place of `x -= y`), or change a copy: `x.clone()`."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if func is Tensor.as_subclass:
                return result
            return _protect_shared(result, (*args, *kwargs.values()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.as_subclass(Tensor)
        return plain.__reduce_ex__(protocol)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.clone().__dlpack__(*args, **kwargs)  # what takes it may write

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __copy__(self) -> Tensor:
        return self


def _writes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call would write into a read-only tensor."""
    if kwargs:
        if (out := kwargs.get("out")) is not None and _is_read_only(out):
            return True
        if kwargs.get("inplace") and args and _is_read_only(args[0]):
            return True
    ends = name.endswith("_") and not name.endswith("__") and name not in _WRITE_NOTHING
    if not ends and name not in _WRITE:
        return False
    return _is_read_only(args[0] if args else kwargs.get("input"))


def _is_read_only(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(isinstance(each, ReadOnlyTensor) for each in value)
    return isinstance(value, ReadOnlyTensor)


def _protect_shared(result: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the result, read-only where it shares memory with a read-only argument."""
    if isinstance(result, Tensor):
        if type(result) is Tensor and _shares(result, arguments):
            return result.as_subclass(ReadOnlyTensor)
    elif isinstance(result, np.ndarray):
        result.flags.writeable = False
    elif isinstance(result, tuple | list) and result and isinstance(result[0], Tensor):
        kept = [_protect_shared(each, arguments) for each in result]
        if isinstance(result, list):
            return kept
        is_named = type(result) is not tuple  # what `max(dim)` and others return
        return type(result)(kept) if is_named else tuple(kept)
    return result


def _shares(result: Tensor, arguments: tuple[Any, ...]) -> bool:
    memory = _memory(result)
    for value in arguments:
        several = value if isinstance(value, tuple | list) else (value,)
        for each in several:
            if isinstance(each, ReadOnlyTensor) and _memory(each) == memory:
                return True
    return False


def _memory(tensor: Tensor) -> int | None:
    """Return the address of the storage; None if it is empty or has no address."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None


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


def json_column(values: Sequence[Any], convert: Callable[[Any], Any] | None = None) -> pa.Array:
    """Build a column of values kept as JSON: an Arrow struct would give each object the keys of
    all, and each key one type and one place.

    Args:
        convert: Called with what JSON cannot hold.
    """
    texts = [None if value is None else json.dumps(value, default=convert) for value in values]
    return pa.array(texts, pa.json_())


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Return the values of a column as Python objects, what is kept as JSON included."""
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
    return _plain(array).as_subclass(ReadOnlyTensor)


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
        return _lists(_to_numpy(values.cu_seqlens), _to_numpy(values.values))
    if isinstance(values, torch.Tensor | np.ndarray):
        return _tensor_column(_to_numpy(values))
    values = list(values)
    if values and all(isinstance(row, torch.Tensor | np.ndarray) for row in values):
        return _rows_column([_to_numpy(row) for row in values])
    if values and all(isinstance(row, list) for row in values):
        return _list_column(values)
    return pa.array(values)


def _lists(offsets: npt.NDArray[Any], values: npt.NDArray[Any]) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(offsets.astype(np.int64)), pa.array(values))


def _tensor_column(values: npt.NDArray[Any]) -> pa.Array:
    if values.ndim == 2:
        rows, width = values.shape
        return _lists(np.arange(rows + 1) * width, values.reshape(-1))
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
    return _lists(np.cumsum([0, *map(len, rows)]), np.concatenate(rows))


def _list_column(rows: list[list[Any]]) -> pa.Array:
    flat = [value for row in rows for value in row]
    if any(not isinstance(value, int | float) for value in flat):
        return pa.array(rows)
    kind = np.int64 if all(isinstance(value, int) for value in flat) else np.float32
    return _lists(np.cumsum([0, *map(len, rows)]), np.asarray(flat, dtype=kind))
