"""Reading parts of tensors from a folder, on a disk or at a URL, and no other bytes than theirs."""

from __future__ import annotations

import json
import os
import re
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.checkpoint.tensors.file_plan import MODEL_STEM
from hybridrl.checkpoint.tensors.rank_manifest import RankManifest
from hybridrl.checkpoint.tensors.safetensors_header import (
    SAFETENSORS_DTYPES,
    TensorEntry,
    read_header,
    view_as_bytes,
)
from hybridrl.errors import ConfigError
from hybridrl.layout.boxes import (
    Box,
    box_numel,
    box_shape,
    contiguous_runs,
    full_box,
    intersect_boxes,
    rebase_box,
    split_box,
)
from hybridrl.system.locations import Location, RemotePath

_WINDOW_BYTES = 16 << 20
"""What is read at once: as large as the boxes that ranks write, each of which is one request."""
_PART = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")


class _StoredBox(NamedTuple):
    """A box of a tensor as it stands in a file.

    Attributes:
        outer: The box whose elements lie in the file in their order: this one, or one around it.
        start: The byte of the file where `outer` begins.
        crc32: Of the values of the box; None: not known.
    """

    file: Location
    box: Box
    outer: Box
    start: int
    crc32: int | None = None


class TensorReader:
    """A reader of the tensors of a folder.

    On a disk these are those of `model.safetensors`, else of the files in
    `model.safetensors.index.json`, else of all safetensors files that are there. At a URL they are
    those of which ranks say that they wrote them, each to a file of its own.

    Args:
        stem: What the files' names begin with; of another than `model` no other files are taken.
        lists: What ranks say that they wrote to the folder. A box of theirs that is read whole is
            compared with its checksum; of one that is read in part nothing can be said.

    Attributes:
        folder: As given.
        shapes: Of all tensors, by name; none if there are no such files.
        dtypes: Of their values in the files.
        bytes_read: Bytes of tensors read so far.

    Raises:
        ConfigError: if a file is missing or damaged, or a tensor is missing or there twice; names
            them.
    """

    def __init__(
        self, folder: Location, stem: str = MODEL_STEM, lists: Sequence[RankManifest] = ()
    ) -> None:
        self.folder = folder
        self.bytes_read = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._stored: dict[str, list[_StoredBox]] = {}
        self._window = torch.empty(0, dtype=torch.uint8)
        self._opened: dict[Path, int] = {}
        weakref.finalize(self, _close, self._opened)
        if isinstance(folder, Path) and not any(one.own for one in lists):
            for name, (path, entry) in _read_entries(folder, stem).items():
                self.shapes[name], self.dtypes[name] = entry.shape, entry.dtype
                whole = full_box(entry.shape)
                self._stored[name] = [_StoredBox(path, whole, whole, entry.start)]
        written: dict[str, list[_StoredBox]] = {}
        for one in lists:
            for box in one.boxes:
                if box.file.startswith((f"{stem}.", f"{stem}-")):
                    self.shapes[box.tensor] = box.shape
                    self.dtypes[box.tensor] = SAFETENSORS_DTYPES[box.dtype]
                    outer, start = full_box(box.shape), box.offset
                    if box.own_start is not None:
                        outer, start = box.box, box.own_start
                    file = folder / one.file_of(box)
                    stored = _StoredBox(file, box.box, outer, start, box.crc32)
                    written.setdefault(box.tensor, []).append(stored)
        self._stored |= written

    @torch.no_grad()
    def read(self, name: str, box: Box, into: Tensor) -> None:
        """Read a box of a tensor into a tensor of its shape, cast to that tensor's dtype.

        Args:
            name: One of `shapes`.
            box: Which part.
            into: Of the shape of the box, on any device; values are cast to its dtype.

        Raises:
            ConfigError: if a file is not what it was, or cannot be read, or lacks some of the box;
                names it.
        """
        lacking = box_numel(box)
        for stored in self._stored[name]:
            if (wanted := intersect_boxes(stored.box, box)) is not None:
                try:
                    self._read_stored(name, stored, wanted, into[_slices(wanted, box)])
                except OSError as error:
                    raise ConfigError(
                        f"{stored.file} could not be read: {error}. See whether it can be reached, "
                        "or resume from another step."
                    ) from error
                lacking -= box_numel(wanted)
        if lacking:
            raise ConfigError(
                f"{self.folder} lacks {lacking} values of `{name}`: no rank says that it wrote "
                "them. Resume from another step."
            )

    def _read_stored(self, name: str, stored: _StoredBox, wanted: Box, into: Tensor) -> None:
        """Read a part of a box that is in one file, and compare the checksum if it is all of it."""
        dtype, found = self.dtypes[name], 0
        is_checked = stored.crc32 is not None and wanted == stored.box
        fits = into.dtype == dtype and into.device.type == "cpu" and into.is_contiguous()
        for part in split_box(wanted, _WINDOW_BYTES // dtype.itemsize):
            target = into[_slices(part, wanted)].detach()
            values = target if fits else self._room(part, dtype)
            memory = view_as_bytes(values)
            self._fill(name, stored, part, memory)
            if is_checked:
                found = zlib.crc32(memory, found)
            if not fits:
                target.copy_(values)
        if is_checked and found != stored.crc32:
            raise _damaged(stored.file, name)

    def _room(self, part: Box, dtype: torch.dtype) -> Tensor:
        """Return memory for a part before it is cast, which the next one uses again."""
        size = box_numel(part) * dtype.itemsize
        if len(self._window) < size:
            self._window = torch.empty(size, dtype=torch.uint8)
        return self._window[:size].view(dtype).view(box_shape(part))

    def _fill(self, name: str, stored: _StoredBox, part: Box, memory: memoryview) -> None:
        """Read the runs of a part into a buffer of as many bytes. At a URL the bytes from the first
        run to the last come in one request."""
        size = self.dtypes[name].itemsize
        inner = contiguous_runs(box_shape(stored.outer), rebase_box(part, stored.outer))
        runs = [(stored.start + first * size, count * size) for first, count in inner]
        at, origin, content = 0, runs[0][0], memoryview(b"")
        if isinstance(stored.file, RemotePath):
            length = sum(runs[-1]) - origin
            content = memoryview(stored.file.read_range(origin, length))
            if len(content) != length:
                raise _damaged(stored.file, name)
        self.bytes_read += len(content) or len(memory)
        for start, length in runs:
            place = memory[at : at + length]
            if isinstance(stored.file, RemotePath):
                place[:] = content[start - origin : start - origin + length]
            else:
                self._read_run(name, stored.file, start, place)
            at += length

    def _read_run(self, name: str, path: Path, start: int, memory: memoryview) -> None:
        """Read the bytes of a file from `start` on. It stays open as long as this object lives."""
        if path not in self._opened:
            self._opened[path] = os.open(path, os.O_RDONLY)
        while memory:  # the system may give less than was asked for
            got = os.preadv(self._opened[path], [memory], start)
            if not got:
                raise ConfigError(
                    f"{path} ended inside `{name}`: it has become shorter since it was opened."
                )
            memory, start = memory[got:], start + got


class TensorInFiles:
    """A tensor of files, of which a box is read when it is asked for, as slices."""

    def __init__(self, files: TensorReader, name: str) -> None:
        self._files, self._name = files, name

    def __getitem__(self, place: tuple[slice, ...]) -> Tensor:
        box = tuple((side.start, side.stop) for side in place)
        values = torch.empty(box_shape(box), dtype=self._files.dtypes[self._name])
        self._files.read(self._name, box, values)
        return values


def index_file_name(stem: str) -> str:
    """Return the name of the index, which says which tensor is in which of several files."""
    return f"{stem}.safetensors.index.json"


def _slices(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return where a box lies in a tensor of the box around it."""
    return tuple(slice(*side) for side in rebase_box(box, outer))


def _damaged(file: Location, name: str) -> ConfigError:
    return ConfigError(
        f"{file} is damaged: `{name}` in it is not what was written. Resume from another step."
    )


def _read_entries(folder: Path, stem: str) -> dict[str, tuple[Path, TensorEntry]]:
    """Return the file of each tensor, and its place there, by the headers of the files."""
    found: dict[str, tuple[Path, TensorEntry]] = {}
    files, index = _files(folder, stem)
    for path in files:
        for name, entry in read_header(path).items():
            if name in found:
                raise ConfigError(
                    f"`{name}` is both in {found[name][0]} and in {path}. Save the model again in "
                    "an empty folder, or remove the files that are left over."
                )
            found[name] = path, entry
    for name, path in index.items():
        if name not in found or found[name][0] != path:
            raise ConfigError(
                f"{folder / index_file_name(stem)} says that `{name}` is in {path}, and it is "
                "not. The files are not of one model; copy, download or save it again."
            )
    return found


def _close(opened: Mapping[Path, int]) -> None:
    for file in opened.values():
        os.close(file)


def _files(folder: Path, stem: str) -> tuple[list[Path], dict[str, Path]]:
    """Return the files to read and, if there is an index, the file that it names for each
    tensor."""
    if (whole := folder / f"{stem}.safetensors").is_file():
        return [whole], {}
    if (folder / index_file_name(stem)).is_file():
        index = dict(_index(folder / index_file_name(stem)))
        files = sorted(set(index.values()))
        if absent := [path for path in files if not path.is_file()]:
            raise ConfigError(
                f"{folder} has no {absent[0].name}, which is named in {index_file_name(stem)} "
                f"({len(absent)} of {len(files)} files are missing). Was the download or the copy "
                "cut short? Do it again."
            )
        return files, index
    found = sorted(folder.glob("*.safetensors" if stem == MODEL_STEM else f"{stem}-*.safetensors"))
    if parts := [path.name for path in found if _PART.fullmatch(path.name)]:
        raise ConfigError(
            f"{folder} has {parts[0]} and no {index_file_name(stem)}, which is written last: "
            "saving or copying the model did not come to its end. Save or copy it again."
        )
    return found, {}


def _index(path: Path) -> Iterator[tuple[str, Path]]:
    try:
        weights = json.loads(path.read_text())["weight_map"]
        for name, file in weights.items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} is no name of a file")
            yield name, path.parent / file
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} does not say which tensor is in which file ({type(error).__name__}: {error}). "
            "Copy, download or save the model again."
        ) from error
