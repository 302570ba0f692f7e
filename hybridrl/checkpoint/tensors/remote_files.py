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
from hybridrl.checkpoint.tensors.rank_manifest import (
    RankManifest,
    WrittenBox,
    WrittenHeader,
    read_manifests,
)
from hybridrl.checkpoint.tensors.safetensors_header import (
    SAFETENSORS_DTYPES,
    build_header,
    view_as_bytes,
)
from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.checkpoint.tensors.tensor_writer import make_written_box
from hybridrl.checkpoint.tensors.write_errors import convert_write_errors
from hybridrl.errors import ConfigError, StorageError
from hybridrl.layout.boxes import Box, box_shape, contiguous_runs, intersect_boxes, rebase_box
from hybridrl.system.locations import Location, RemotePath


def write_remote_file(
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
    shapes = {name: box_shape(part.box) for name, part in zip(names, parts, strict=True)}
    dtypes = {name: part.entry.dtype for name, part in zip(names, parts, strict=True)}
    header, entries, length = build_header(shapes, torch.float32, dtypes)
    boxes: list[WrittenBox] = []
    with convert_write_errors(file), file.writing() as sent:
        sent.write(header)
        for name, part, tensor in zip(names, parts, values, strict=True):
            if stop():
                raise StorageError(f"{file} was not written: the worker ended before.")
            memory = view_as_bytes(tensor.to("cpu", part.entry.dtype))
            sent.write(memory)
            box = make_written_box(part, zlib.crc32(memory))
            boxes.append(box._replace(own_start=entries[name].start))
    return {file.name: WrittenHeader(len(header), zlib.crc32(header), length)}, boxes


def load_manifests(folder: Location) -> list[RankManifest]:
    """Read the manifests of all ranks that wrote to a folder.

    Raises:
        ConfigError: if that cannot be read.
    """
    try:
        return read_manifests(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} could not be read: {error}. Resume from another step."
        ) from error


def open_tensor_reader(
    folder: Location, stem: str, lists: Sequence[RankManifest]
) -> TensorReader | RemoteTensorReader:
    """Open the tensors of a folder, on a disk or at a URL.

    Args:
        stem: What the names of their files begin with.
        lists: Of the folder.
    """
    kind = TensorReader if isinstance(folder, Path) else RemoteTensorReader
    return kind(folder, stem, lists)


class RemoteTensorReader:
    """A reader of the tensors of a folder at a URL; see `TensorReader`.

    Args:
        stem: What the names of their files would begin with on a disk.
        lists: Of the folder.
    """

    def __init__(self, folder: RemotePath, stem: str, lists: Iterable[RankManifest]) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._boxes: dict[str, list[tuple[RankManifest, WrittenBox]]] = {}
        for one in lists:
            for box in one.boxes:
                if box.file.startswith((f"{stem}.", f"{stem}-")):
                    self._boxes.setdefault(box.tensor, []).append((one, box))
        self.shapes = {name: found[0][1].shape for name, found in self._boxes.items()}
        self.dtypes = {
            name: SAFETENSORS_DTYPES[found[0][1].dtype] for name, found in self._boxes.items()
        }

    @torch.no_grad()
    def read(self, name: str, box: Box, into: Tensor) -> None:
        """Read a box of a tensor; see `TensorReader.read`. Of another rank's box it reads the bytes
        from the first wanted value to the last."""
        for one, written in self._boxes[name]:
            wanted = intersect_boxes(written.box, box)
            if wanted is None:
                continue
            values, first = self._fetch(self.folder / one.file_of(written), written, wanted)
            at = 0
            part = torch.empty(box_shape(wanted), dtype=SAFETENSORS_DTYPES[written.dtype])
            flat = part.view(-1)
            for start, count in contiguous_runs(
                box_shape(written.box), rebase_box(wanted, written.box)
            ):
                flat[at : at + count] = values[start - first : start - first + count]
                at += count
            into[tuple(slice(*sides) for sides in rebase_box(wanted, box))].copy_(part)

    def _fetch(self, file: RemotePath, written: WrittenBox, wanted: Box) -> tuple[Tensor, int]:
        """Read the values of a written box from the first wanted one to the last; return also the
        index of the first in the box."""
        dtype = SAFETENSORS_DTYPES[written.dtype]
        found = list(contiguous_runs(box_shape(written.box), rebase_box(wanted, written.box)))
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
