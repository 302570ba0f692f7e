"""Writing tensors from the ranks that hold their parts, as the safetensors files of one folder."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.checkpoint.tensors.file_plan import (
    MAX_FILE_BYTES,
    MODEL_STEM,
    FilePart,
    FilePlan,
    plan_files,
)
from hybridrl.checkpoint.tensors.rank_manifest import WrittenBox, WrittenHeader
from hybridrl.checkpoint.tensors.safetensors_header import (
    NO_OTHERS,
    SAFETENSORS_NAMES,
    build_header,
    view_as_bytes,
)
from hybridrl.checkpoint.tensors.tensor_reader import TensorInFiles, index_file_name
from hybridrl.checkpoint.tensors.write_errors import convert_write_errors, raise_on_all_ranks
from hybridrl.errors import StorageError
from hybridrl.layout.boxes import box_shape, contiguous_runs
from hybridrl.layout.tensor_layout import TensorLayout
from hybridrl.system.locations import Location, RemotePath, sync_directory, write_atomically


def write_tensors(
    folder: Path,
    layout: TensorLayout,
    rank: int,
    read: Callable[[str], Tensor | TensorInFiles],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    file_bytes: int = MAX_FILE_BYTES,
    stem: str = MODEL_STEM,
    dtypes: Mapping[str, torch.dtype] = NO_OTHERS,
) -> None:
    """Write all tensors of a layout, in the order of its `shapes`. Collective.

    Every rank writes parts of the same files at their places, so the folder must be one that all
    of them share. What several ranks hold is written once, by those that have written least. A
    rank needs memory for one piece (4 Mi elements, see `FilePlan`) beyond what it holds.

    The files get their names when everything is on the disk, and the index comes last. A folder
    that held a model before is without one in between, never a mixture of two.

    Args:
        layout: Which parts the ranks of `group` hold.
        rank: This one's number in it; 0 makes the files.
        read: Name of a local tensor of the layout to the tensor.
        dtype: Of the values in the files.
        group: The ranks; None: there is one only.
        file_bytes: Largest file, unless one tensor is larger.
        stem: What the names of the files begin with.
        dtypes: Of tensors that have another one than `dtype`.

    Raises:
        StorageError: on all ranks, if one of them could not write; names the file.
        LayoutError: if nobody holds some part of a tensor.
    """
    plan = plan_files(layout, rank, dtype, file_bytes, stem, dtypes)
    try:
        with raise_on_all_ranks(group), convert_write_errors(folder):
            if rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                for file, header in plan.headers.items():
                    with _part(folder, file).open("wb") as begun:
                        begun.write(header)
                        begun.truncate(plan.lengths[file])
        with raise_on_all_ranks(group):
            values = (slice_part(part, read(part.source.tensor)) for part in plan.parts)
            write_parts(lambda file: _part(folder, file), plan.parts, values)
        with raise_on_all_ranks(group), convert_write_errors(folder):
            if rank == 0:
                _publish(folder, plan, stem)
    finally:
        if rank == 0:
            for file in plan.headers:
                with contextlib.suppress(OSError):
                    _part(folder, file).unlink(missing_ok=True)


@torch.no_grad()
def write_parts(
    path: Callable[[str], Path],
    parts: Sequence[FilePart],
    values: Iterable[Tensor],
    stop: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Write parts of files, which are created if they do not exist, and wait until they are on the
    disk.

    Args:
        path: Where a file is, by its name.
        parts: Those of one file together.
        values: Of each part, of the shape of its box, on any device.
        stop: Asked before each part whether to give up.

    Returns:
        The crc32 of each part as it stands in its file.

    Raises:
        StorageError: if a file cannot be written, or if it was stopped; names it.
    """
    sums: list[int] = []
    pairs = zip(parts, values, strict=True)
    for file, some in itertools.groupby(pairs, key=lambda pair: pair[0].file):
        with _shared_file(path(file)) as opened:
            for part, tensor in some:
                if stop():
                    raise StorageError(_was_stopped(path(file).parent))
                memory = view_as_bytes(tensor.to("cpu", part.entry.dtype))
                _write_box(opened, part, memory)
                sums.append(zlib.crc32(memory))
    return sums


def write_remote_file(
    folder: RemotePath,
    rank: int,
    parts: Sequence[FilePart],
    values: Iterable[Tensor],
    stop: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, WrittenHeader], list[WrittenBox]]:
    """Write parts of files to a file of this rank's own, at a URL, where nobody writes into the
    middle of a file. It is there when everything has been sent, and is one that safetensors reads:
    each box is a tensor in it, called by the tensor that it is a part of and by its place there.

    Args:
        parts, values, stop: As for `write_parts`.

    Returns:
        What the rank's list is to say: its `own` and its `boxes`.

    Raises:
        StorageError: if it cannot be written, or if it was stopped; names the file.
    """
    file = folder / f"rank-{rank:05}.safetensors"
    names = [f"{part.name}{list(map(list, part.box))}" for part in parts]
    shapes = {name: box_shape(part.box) for name, part in zip(names, parts, strict=True)}
    dtypes = {name: part.entry.dtype for name, part in zip(names, parts, strict=True)}
    header, entries, length = build_header(shapes, torch.float32, dtypes)
    boxes: list[WrittenBox] = []
    with convert_write_errors(file), file.writing() as sent:
        sent.write(header)
        for name, part, tensor in zip(names, parts, values, strict=True):
            if stop():
                raise StorageError(_was_stopped(file))
            memory = view_as_bytes(tensor.to("cpu", part.entry.dtype))
            sent.write(memory)
            box = make_written_box(part, zlib.crc32(memory))
            boxes.append(box._replace(own_start=entries[name].start))
    return {file.name: WrittenHeader(len(header), zlib.crc32(header), length)}, boxes


def write_headers(folder: Path, plan: FilePlan) -> None:
    """Write the headers of a plan's files, while others may write to them.

    Raises:
        StorageError: if one cannot be written; names it.
    """
    for file, header in plan.headers.items():
        with _shared_file(folder / file) as opened:
            os.pwrite(opened, header, 0)


def make_header_entries(plan: FilePlan) -> dict[str, WrittenHeader]:
    """Build the entries of a rank's manifest for the headers of a plan."""
    return {
        file: WrittenHeader(len(header), zlib.crc32(header), plan.lengths[file])
        for file, header in plan.headers.items()
    }


def make_written_box(part: FilePart, crc32: int) -> WrittenBox:
    """Build the entry of a rank's manifest for a part."""
    name, shape, start = SAFETENSORS_NAMES[part.entry.dtype], part.entry.shape, part.entry.start
    return WrittenBox(part.name, name, shape, part.box, part.file, start, crc32)


def slice_part(part: FilePart, tensor: Tensor | TensorInFiles) -> Tensor:
    """Return the slice of a local tensor that a part takes."""
    inner = zip(part.source.start, box_shape(part.box), strict=True)
    return tensor[tuple(slice(at, at + n) for at, n in inner)]


def write_small_file(path: Location, content: bytes) -> None:
    """Write a small file atomically, and wait until it is on the disk.

    Raises:
        StorageError: if that fails; names the file.
    """
    with convert_write_errors(path):
        write_atomically(path, content)


@contextlib.contextmanager
def _shared_file(path: Path) -> Iterator[int]:
    """Open a file that others may write to as well, and create it if it does not exist; at the end
    of the block what it wrote is on the disk."""
    with convert_write_errors(path):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            yield opened
            os.fsync(opened)
        finally:
            os.close(opened)


def _was_stopped(place: Location) -> str:
    return f"{place} was not written: the worker ended before."


def _write_box(file: int, part: FilePart, memory: memoryview) -> None:
    at, size = 0, part.entry.dtype.itemsize
    for first, count in contiguous_runs(part.entry.shape, part.box):
        start, stop = part.entry.start + first * size, at + count * size
        while at < stop:  # the system may take less than it was given
            taken = os.pwrite(file, memory[at:stop], start)
            at, start = at + taken, start + taken


def _publish(folder: Path, plan: FilePlan, stem: str) -> None:
    """Give the files their names, and remove what is left of an earlier model."""
    index = folder / index_file_name(stem)
    if plan.index:
        # From here to its return the folder is one that is not finished, not a mixture of two
        # models; one that was a single file stays what readers take until that file goes.
        index.unlink(missing_ok=True)
    for file in plan.headers:
        _part(folder, file).replace(folder / file)
    kept = {*plan.headers, *([index.name] if plan.index else [])}
    if plan.index:
        write_small_file(_part(folder, index.name), plan.index.encode())
        _part(folder, index.name).replace(index)
    ours = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors")
    for path in folder.iterdir():
        if path.name not in kept and (path.name == index.name or ours.fullmatch(path.name)):
            path.unlink()
    sync_directory(folder)


def _part(folder: Path, file: str) -> Path:
    """Return the temporary path of a file until it is complete; the same on every rank."""
    return folder / f".{file}.part"
