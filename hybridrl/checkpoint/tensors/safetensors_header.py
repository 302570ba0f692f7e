"""The header of a safetensors file: which bytes of the file are which tensor.

A file is 8 bytes (the length of the header, little endian), the header (JSON) and the values of all
tensors, one after the other without gaps: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.errors import ConfigError

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The number formats that are read here, by the names that headers use."""
SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
NO_OTHERS: Mapping[str, torch.dtype] = {}
"""All tensors have one dtype."""
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""What safetensors itself allows."""


class TensorEntry(NamedTuple):
    """The dtype, shape and place of a tensor in a file.

    Attributes:
        shape: Of the tensor.
        dtype: Of its values in the file.
        start: The byte of the file where its values begin.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read the header of a file: its tensors, by name.

    Raises:
        ConfigError: if the file is damaged: header, sizes, places and length do not agree. Names
            the file, and the tensor where it is about one.
    """
    try:
        with path.open("rb") as file:
            length = path.stat().st_size
            prefix = file.read(_LENGTH.size)
            if len(prefix) < _LENGTH.size:
                raise _damaged(path, f"it has {length} bytes, fewer than the length of a header")
            (size,) = _LENGTH.unpack(prefix)
            if size > min(_MAX_HEADER_BYTES, length - _LENGTH.size):
                raise _damaged(path, f"its header should have {size} bytes, and it has {length}")
            text = file.read(size)
    except OSError as error:
        raise ConfigError(f"{path} could not be read: {error.strerror or error}.") from error
    try:
        read = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header cannot be read ({error})") from error
    if not isinstance(read, dict):
        raise _damaged(path, "its header is no table of tensors")
    read.pop("__metadata__", None)
    first = _LENGTH.size + size
    found, places = {}, []
    for name, described in read.items():
        entry, stop = _entry(path, name, described)
        places.append((entry.start, stop, name))
        found[name] = entry._replace(start=first + entry.start)
    end = 0
    for start, stop, name in sorted(places):
        if start != end:
            raise _damaged(path, f"`{name}` begins at byte {start} of the values, not at {end}")
        end = stop
    if first + end != length:
        raise _damaged(path, f"it should have {first + end} bytes, and has {length}")
    return found


def build_header(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    dtypes: Mapping[str, torch.dtype] = NO_OTHERS,
) -> tuple[bytes, dict[str, TensorEntry], int]:
    """Build the first bytes of a file; return also the entry of each tensor and the length of the
    file.

    Args:
        dtypes: Of tensors that have another one than `dtype`.
    """
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers insists on it
    starts, end = {}, 0
    for name, shape in shapes.items():
        own = dtypes.get(name, dtype)
        starts[name] = end
        end += math.prod(shape) * own.itemsize
        described[name] = {
            "dtype": SAFETENSORS_NAMES[own],
            "shape": list(shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values are aligned, for those who map the file
    first = _LENGTH.size + len(text)
    entries = {
        name: TensorEntry(shapes[name], dtypes.get(name, dtype), first + start)
        for name, start in starts.items()
    }
    return _LENGTH.pack(len(text)) + text, entries, first + end


def view_as_bytes(values: Tensor) -> memoryview:
    """View a host tensor as the bytes that stand in a file, in the order of its elements."""
    flat = values.contiguous().view(values.numel()).view(torch.uint8)
    return flat.numpy().data


def _entry(path: Path, name: str, described: Any) -> tuple[TensorEntry, int]:
    """Parse the entry of a tensor; its start and the stop returned with it count from the first
    value."""
    try:
        dtype, shape, places = (described[key] for key in ("dtype", "shape", "data_offsets"))
        start, stop = places
        numbers = [*shape, start, stop]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"what it says of `{name}` is no dtype, shape and place") from error
    if dtype not in SAFETENSORS_DTYPES:
        raise ConfigError(
            f"{path} has `{name}` as {dtype}, which is not read here; save the model in one of "
            f"{', '.join(SAFETENSORS_DTYPES)}."
        )
    if stop - start != math.prod(shape) * SAFETENSORS_DTYPES[dtype].itemsize:
        raise _damaged(path, f"`{name}` of shape {shape} as {dtype} has {stop - start} bytes")
    return TensorEntry(tuple(shape), SAFETENSORS_DTYPES[dtype], start), stop


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a table from pairs, and refuse a name that stands there twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"`{name}` stands there twice")
        found[name] = value
    return found


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is damaged: {why}. It may not have been copied or written to its end; copy, "
        "download or save the model again."
    )
