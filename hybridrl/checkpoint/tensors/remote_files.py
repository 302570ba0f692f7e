"""Tensors at a URL, where each rank writes its boxes to a file of its own and any rank reads parts.

Such a file is one that safetensors reads: each box is a tensor in it, called by the tensor that it
is a part of and by its place there. What is read goes by the lists
(`hybridrl.checkpoint.tensors.rank_manifest`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.checkpoint.tensors.file_plan import FilePart
from hybridrl.checkpoint.tensors.rank_manifest import Written, WrittenBox, WrittenHeader, read_lists
from hybridrl.checkpoint.tensors.safetensors_header import DTYPES, bytes_of, make_header
from hybridrl.checkpoint.tensors.tensor_reader import TensorFiles
from hybridrl.checkpoint.tensors.tensor_writer import written_box
from hybridrl.checkpoint.tensors.write_errors import explained
from hybridrl.errors import ConfigError, StorageError
from hybridrl.layout.boxes import Box, extent, intersection, relative, runs
from hybridrl.system.locations import Location, RemotePath


def write_apart(
    folder: RemotePath,
    rank: int,
    parts: Sequence[FilePart],
    values: Iterable[Tensor],
    stop: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, WrittenHeader], list[WrittenBox]]:
    """Sends parts of files as a file of this rank's own, which is there when
    everything has been sent.

    Args:
        parts, values, stop: As for `write_parts`.

    Returns:
        What the rank's list is to say: its `own` and its `boxes`.

    Raises:
        StorageError: if it cannot be written, or if it was stopped; names the file.
    """
    file = folder / f"rank-{rank:05}.safetensors"
    names = [f"{part.name}{list(map(list, part.box))}" for part in parts]
    shapes = {name: extent(part.box) for name, part in zip(names, parts, strict=True)}
    dtypes = {name: part.entry.dtype for name, part in zip(names, parts, strict=True)}
    header, entries, length = make_header(shapes, torch.float32, dtypes)
    boxes: list[WrittenBox] = []
    with explained(file), file.writing() as sent:
        sent.write(header)
        for name, part, tensor in zip(names, parts, values, strict=True):
            if stop():
                raise StorageError(f"{file} was not written: the worker ended before.")
            memory = bytes_of(tensor.to("cpu", part.entry.dtype))
            sent.write(memory)
            box = written_box(part, zlib.crc32(memory))
            boxes.append(box._replace(own_start=entries[name].start))
    return {file.name: WrittenHeader(len(header), zlib.crc32(header), length)}, boxes


def open_lists(folder: Location) -> list[Written]:
    """Read the manifests of all ranks that wrote to a folder.

    Raises:
        ConfigError: if that cannot be read.
    """
    try:
        return read_lists(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} could not be read: {error}. Resume from another step."
        ) from error


def open_tensors(
    folder: Location, stem: str, lists: Sequence[Written]
) -> TensorFiles | TensorsApart:
    """Open the tensors of a folder, on a disk or at a URL.

    Args:
        stem: What the names of their files begin with.
        lists: Of the folder.
    """
    kind = TensorFiles if isinstance(folder, Path) else TensorsApart
    return kind(folder, stem, lists)


class TensorsApart:
    """A reader of the tensors of a folder at a URL; see `TensorReader`.

    Args:
        stem: What the names of their files would begin with on a disk.
        lists: Of the folder.
    """

    def __init__(self, folder: RemotePath, stem: str, lists: Iterable[Written]) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._boxes: dict[str, list[tuple[Written, WrittenBox]]] = {}
        for one in lists:
            for box in one.boxes:
                if box.file.startswith((f"{stem}.", f"{stem}-")):
                    self._boxes.setdefault(box.tensor, []).append((one, box))
        self.shapes = {name: found[0][1].shape for name, found in self._boxes.items()}
        self.dtypes = {name: DTYPES[found[0][1].dtype] for name, found in self._boxes.items()}

    @torch.no_grad()
    def read(self, name: str, box: Box, into: Tensor) -> None:
        """Read a box of a tensor; see `TensorReader.read`. Of another rank's box it reads the bytes
        from the first wanted value to the last."""
        for one, written in self._boxes[name]:
            wanted = intersection(written.box, box)
            if wanted is None:
                continue
            values, first = self._fetch(self.folder / one.file_of(written), written, wanted)
            at = 0
            part = torch.empty(extent(wanted), dtype=DTYPES[written.dtype])
            flat = part.view(-1)
            for start, count in runs(extent(written.box), relative(wanted, written.box)):
                flat[at : at + count] = values[start - first : start - first + count]
                at += count
            into[tuple(slice(*sides) for sides in relative(wanted, box))].copy_(part)

    def _fetch(self, file: RemotePath, written: WrittenBox, wanted: Box) -> tuple[Tensor, int]:
        """Read the values of a written box from the first wanted one to the last; return also the
        index of the first in the box."""
        dtype = DTYPES[written.dtype]
        found = list(runs(extent(written.box), relative(wanted, written.box)))
        first, stop = found[0][0], sum(found[-1])
        start = (written.own_start or 0) + first * dtype.itemsize
        length = (stop - first) * dtype.itemsize
        try:
            content = file.read_range(start, length)
        except OSError as error:
            raise ConfigError(
                f"{file} could not be read: {error}. See whether it can be reached, or resume from "
                "another step."
            ) from error
        self.bytes_read += len(content)
        whole = length == written.size
        if len(content) != length or (whole and zlib.crc32(content) != written.crc32):
            raise ConfigError(
                f"{file} is damaged: `{written.tensor}` in it is not what was written. Resume from "
                "another step."
            )
        return torch.frombuffer(bytearray(content), dtype=dtype), first
