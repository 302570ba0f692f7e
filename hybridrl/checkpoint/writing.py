"""Writing a model from the ranks that hold its parts, as the safetensors files of one folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.checkpoint.agreement import agreed, explained
from hybridrl.checkpoint.header import Entry, make_header, read_header
from hybridrl.checkpoint.reading import INDEX, WHOLE, WINDOW_BYTES
from hybridrl.core.boxes import Box, extent, runs, volume, whole, windows
from hybridrl.core.layout import Layout, Move, Piece, local_pieces, plan

FILE_BYTES = 5 << 30
"""Largest file, unless one tensor is larger."""
_FILES = -1
"""The files' number in layouts: a rank that is to hold every tensor whole."""
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def write_tensors(
    folder: Path,
    layout: Layout,
    rank: int,
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes all tensors of a layout, in the order of its `shapes`. Collective.

    Every rank writes parts of the same files at their places, so the folder must be one that all
    of them share. What several ranks hold is written once, by those that have written least. A
    rank needs a window of memory beyond what it holds.

    The files get their names when everything is on the disk, and the index comes last. A folder
    that held a model before is without one in between, never a mixture of two.

    Args:
        layout: Which parts the ranks of `group` hold.
        rank: This one's number in it; 0 makes the files.
        read: Name of a local tensor of the layout to the tensor.
        dtype: Of the values in the files.
        group: The ranks; None: there is one only.

    Raises:
        StorageError: on all ranks, if one of them could not write; names the file.
        LayoutError: if nobody holds some part of a tensor.
    """
    files = _files(layout.shapes, dtype, file_bytes)
    headers = {file: make_header(shapes, dtype) for file, shapes in files.items()}
    moves = plan(layout, Layout(layout.shapes, {_FILES: _everything(layout)})).moves
    mine: dict[str, list[Move]] = {}
    for move in moves:
        if move.sender == rank:
            mine.setdefault(move.name, []).append(move)
    try:
        with agreed(group), explained(folder):
            if rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                for file, (header, _, length) in headers.items():
                    with _part(folder, file).open("wb") as begun:
                        begun.write(header)
                        begun.truncate(length)
        with agreed(group):
            for file, (_, entries, _) in headers.items():
                ours = {name: mine[name] for name in entries if name in mine}
                if ours:
                    with explained(folder / file):
                        _write(_part(folder, file), entries, ours, read)
        with agreed(group), explained(folder):
            if rank == 0:
                _publish(folder, files)
    finally:
        if rank == 0:
            for file in files:
                with contextlib.suppress(OSError):
                    _part(folder, file).unlink(missing_ok=True)


def _files(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, file_bytes: int
) -> dict[str, dict[str, tuple[int, ...]]]:
    """The tensors of each file, by its name."""
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    room = file_bytes
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if size > room and parts[-1]:
            parts.append({})
            room = file_bytes
        parts[-1][name] = shape
        room -= size
    if len(parts) == 1:
        return {WHOLE: parts[0]}
    count = len(parts)
    return {f"model-{i:05}-of-{count:05}.safetensors": part for i, part in enumerate(parts, 1)}


def _everything(layout: Layout) -> dict[str, tuple[Piece, ...]]:
    return {name: local_pieces(name, whole(shape)) for name, shape in layout.shapes.items()}


@torch.no_grad()
def _write(
    path: Path,
    entries: Mapping[str, Entry],
    moves: Mapping[str, list[Move]],
    read: Callable[[str], Tensor],
) -> None:
    """Writes this rank's parts of one file, and waits until they are on the disk."""
    with path.open("r+b", buffering=0) as file:
        for name, parts in moves.items():
            entry = entries[name]
            for move in parts:
                for box in windows(move.box, WINDOW_BYTES // entry.dtype.itemsize):
                    tensor, start = move.part(box).source
                    inner = zip(start, extent(box), strict=True)
                    values = read(tensor)[tuple(slice(at, at + n) for at, n in inner)]
                    values = values.to("cpu", entry.dtype).contiguous()
                    _write_box(file.fileno(), entry, box, values)
        os.fsync(file.fileno())


def _write_box(file: int, entry: Entry, box: Box, values: Tensor) -> None:
    flat = values.view(volume(box)).view(torch.uint8)
    memory, at, size = flat.numpy().data, 0, entry.dtype.itemsize
    for first, count in runs(entry.shape, box):
        start, stop = entry.start + first * size, at + count * size
        while at < stop:  # the system may take less than it was given
            taken = os.pwrite(file, memory[at:stop], start)
            at, start = at + taken, start + taken


def _publish(folder: Path, files: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
    """Gives the files their names, and takes away what is left of a model that was there."""
    if len(files) > 1:
        # From here to its return the folder is one that is not finished, not a mixture of two
        # models; one that was a single file stays what readers take until that file goes.
        (folder / INDEX).unlink(missing_ok=True)
    for file in files:
        _part(folder, file).replace(folder / file)
    kept = set(files)
    if len(files) > 1:
        _write_index(folder, files)
        kept.add(INDEX)
    for path in folder.iterdir():
        if path.name not in kept and (path.name == INDEX or _OURS.fullmatch(path.name)):
            path.unlink()
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)  # the names, too
    finally:
        os.close(place)


def _write_index(folder: Path, files: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
    named = {name: file for file, shapes in files.items() for name in shapes}
    headers = (read_header(folder / file).values() for file in files)
    total = sum(math.prod(e.shape) * e.dtype.itemsize for header in headers for e in header)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": named}, indent=2)
    with _part(folder, INDEX).open("w") as index:
        index.write(text + "\n")
        index.flush()
        os.fsync(index.fileno())
    _part(folder, INDEX).replace(folder / INDEX)


def _part(folder: Path, file: str) -> Path:
    """Where a file is until it is whole; the same on every rank."""
    return folder / f".{file}.part"
