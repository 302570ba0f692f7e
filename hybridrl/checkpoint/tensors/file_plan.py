"""Plans of the files that hold the tensors of a layout, and of the parts that each rank writes.

Nothing here touches a tensor or a file. A plan depends on the layout only, so it is made once and
serves every time that the same tensors are written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hybridrl.checkpoint.tensors.safetensors_header import NO_OTHERS, TensorEntry, build_header
from hybridrl.layout.boxes import Box, Piece, Place, box_numel, full_box, split_box
from hybridrl.layout.tensor_layout import TensorLayout, TensorMove
from hybridrl.layout.transfer_planner import plan_transfer

MODEL_STEM = "model"
"""What the names of a model's files begin with, as transformers has it."""
MAX_FILE_BYTES = 5 << 30
"""Largest file, unless one tensor is larger."""
_MAX_PIECE_ELEMENTS = 4 << 20
"""Most that is written at once, and dealt to a rank of several that hold it: 16 MiB of float32."""
_FILES = -1
"""The files' number in layouts: a rank that is to hold every tensor whole."""


class FilePart(NamedTuple):
    """A box of a tensor that this rank writes to a file.

    Attributes:
        file: Name of the file.
        name: Of the tensor in the file.
        entry: Where in the file the tensor lies.
        box: Which part of the tensor.
        source: Where this rank has it.
    """

    file: str
    name: str
    entry: TensorEntry
    box: Box
    source: Place

    @property
    def size(self) -> int:
        """Return the bytes of the box in the file."""
        return box_numel(self.box) * self.entry.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """The safetensors files of a folder that share a stem, and what this rank writes to them.

    Attributes:
        headers: First bytes of each file, by its name.
        lengths: Bytes of each file.
        index: What `index_file_name(stem)` is to say; empty where a single file needs none.
        parts: What this rank writes, in the order of the files and of the bytes in them.
    """

    headers: Mapping[str, bytes]
    lengths: Mapping[str, int]
    index: str
    parts: tuple[FilePart, ...]


def _assign_boxes(layout: TensorLayout, rank: int) -> tuple[TensorMove, ...]:
    """Assign to a rank of the layout the boxes that it writes.

    Together the ranks write everything once. What several of them hold is dealt over these in
    pieces, so that all ranks end at about the same number of bytes.
    """
    pieces = {
        name: tuple(
            Piece(box, name, tuple(start for start, _ in box))
            for box in split_box(full_box(shape), _MAX_PIECE_ELEMENTS)
        )
        for name, shape in layout.shapes.items()
    }
    return plan_transfer(layout, TensorLayout(layout.shapes, {_FILES: pieces}), rank).moves


def plan_files(
    layout: TensorLayout,
    rank: int,
    dtype: torch.dtype,
    file_bytes: int,
    stem: str,
    dtypes: Mapping[str, torch.dtype] = NO_OTHERS,
) -> FilePlan:
    """Plan the files for the tensors of a layout, in the order of its `shapes`.

    Args:
        rank: Of the layout: what it writes is planned.
        dtype: Of the values in the files.
        file_bytes: Largest file, unless one tensor is larger.
        stem: What the names of the files begin with.
        dtypes: Of tensors that have another one than `dtype`.

    Raises:
        LayoutError: if nobody holds some part of a tensor.
    """
    shapes = layout.shapes
    headers: dict[str, bytes] = {}
    lengths: dict[str, int] = {}
    named: dict[str, str] = {}
    sizes = {
        name: math.prod(shape) * dtypes.get(name, dtype).itemsize for name, shape in shapes.items()
    }
    entries: dict[str, tuple[str, TensorEntry]] = {}
    for file, inside in _split(sizes, file_bytes, stem).items():
        # Wide values first: readers want each tensor at a multiple of its own width.
        inside.sort(key=lambda name: -dtypes.get(name, dtype).itemsize)
        here = {name: shapes[name] for name in inside}
        headers[file], found, lengths[file] = build_header(here, dtype, dtypes)
        entries |= {name: (file, entry) for name, entry in found.items()}
        named |= dict.fromkeys(inside, file)
    index = ""
    if len(headers) > 1:
        metadata = {"total_size": sum(sizes.values())}
        index = json.dumps({"metadata": metadata, "weight_map": named}, indent=2) + "\n"
    parts = [
        FilePart(entries[move.name][0], move.name, entries[move.name][1], move.box, move.source)
        for move in _assign_boxes(layout, rank)
    ]
    parts.sort(key=lambda part: (part.file, part.entry.start, part.box))
    return FilePlan(headers, lengths, index, tuple(parts))


def _split(sizes: Mapping[str, int], file_bytes: int, stem: str) -> dict[str, list[str]]:
    """Group the tensors by file, in files of limited size."""
    files: list[list[str]] = [[]]
    room = file_bytes
    for name, size in sizes.items():
        if size > room and files[-1]:
            files.append([])
            room = file_bytes
        files[-1].append(name)
        room -= size
    if len(files) == 1:
        return {f"{stem}.safetensors": files[0]}
    count = len(files)
    return {f"{stem}-{i:05}-of-{count:05}.safetensors": inside for i, inside in enumerate(files, 1)}
