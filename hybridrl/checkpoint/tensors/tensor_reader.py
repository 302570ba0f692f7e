"""Reading parts of tensors from a model folder, and no other bytes than theirs."""

from __future__ import annotations

import json
import os
import re
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.checkpoint.tensors.file_plan import MODEL_STEM
from hybridrl.checkpoint.tensors.rank_manifest import RankManifest, WrittenBox
from hybridrl.checkpoint.tensors.safetensors_header import TensorEntry, read_header, view_as_bytes
from hybridrl.errors import ConfigError
from hybridrl.layout.boxes import (
    Box,
    box_numel,
    box_shape,
    contiguous_runs,
    intersect_boxes,
    rebase_box,
    split_box,
)

_WINDOW_BYTES = 8 << 20
"""What is read at once; with it reading needs no more memory than what is read."""
_PART = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")


class TensorReader:
    """A reader of the safetensors files of a folder: of `model.safetensors`, else of the files in
    `model.safetensors.index.json`, else of all that are there.

    Args:
        stem: What the files' names begin with; of another than `model` no other files are taken.
        lists: What ranks say that they wrote to the folder. A box of theirs that is read whole is
            compared with its checksum, if it is not cast; of one that is read in part nothing can
            be said.

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
        self, folder: Path, stem: str = MODEL_STEM, lists: Iterable[RankManifest] = ()
    ) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._entries: dict[str, tuple[Path, TensorEntry]] = {}
        files, index = _files(folder, stem)
        for path in files:
            for name, entry in read_header(path).items():
                if name in self._entries:
                    raise ConfigError(
                        f"`{name}` is both in {self._entries[name][0]} and in {path}. Save the "
                        "model again in an empty folder, or remove the files that are left over."
                    )
                self._entries[name] = path, entry
        for name, path in index.items():
            if self._entries.get(name, (None,))[0] != path:
                raise ConfigError(
                    f"{folder / index_file_name(stem)} says that `{name}` is in {path}, and it is "
                    "not. The files are not of one model; copy, download or save it again."
                )
        self.shapes = {name: entry.shape for name, (_, entry) in self._entries.items()}
        self.dtypes = {name: entry.dtype for name, (_, entry) in self._entries.items()}
        self._window = torch.empty(0, dtype=torch.uint8)
        self._opened: dict[Path, int] = {}
        weakref.finalize(self, _close, self._opened)
        self._written: dict[str, list[WrittenBox]] = {}
        for box in (box for one in lists for box in one.boxes):
            self._written.setdefault(box.tensor, []).append(box)

    @torch.no_grad()
    def read(self, name: str, box: Box, into: Tensor) -> None:
        """Read a box of a tensor into a tensor of its shape, cast to that tensor's dtype.

        Args:
            name: One of `shapes`.
            box: Which part.
            into: Of the shape of the box, on any device; values are cast to its dtype.

        Raises:
            ConfigError: if the file is not what it was; names it.
        """
        path, entry = self._entries[name]
        file, size = self._open(path), entry.dtype.itemsize
        is_plain = into.device.type == "cpu" and into.is_contiguous()
        if is_plain and into.dtype == entry.dtype:  # no window in between
            values = into.detach().view(-1).view(torch.uint8)
            self._fill(file, path, name, entry, box, values)
            self._check(path, name, box, into)
            return
        if len(self._window) < min(_WINDOW_BYTES, box_numel(box) * size):
            self._window = torch.empty(_WINDOW_BYTES, dtype=torch.uint8)
        for part in split_box(box, _WINDOW_BYTES // size):
            values = self._window[: box_numel(part) * size]
            self._fill(file, path, name, entry, part, values)
            place = tuple(slice(*side) for side in rebase_box(part, box))
            into[place].copy_(values.view(entry.dtype).view(box_shape(part)))
        self._check(path, name, box, into)

    def _check(self, path: Path, name: str, box: Box, values: Tensor) -> None:
        """Compare what was read of a box with the checksums of the written boxes that it holds
        whole."""
        is_cast = values.dtype != self._entries[name][1].dtype
        for one in self._written.get(name, ()):
            if is_cast or intersect_boxes(one.box, box) != one.box:
                continue
            place = tuple(slice(*side) for side in rebase_box(one.box, box))
            if zlib.crc32(view_as_bytes(values[place].cpu())) != one.crc32:
                raise ConfigError(
                    f"{path} is damaged: `{name}` in it is not what was written. Resume from "
                    "another step."
                )

    def _open(self, path: Path) -> int:
        """Return the descriptor of a file, which stays open as long as this object lives."""
        if path not in self._opened:
            self._opened[path] = os.open(path, os.O_RDONLY)
        return self._opened[path]

    def _fill(
        self, file: int, path: Path, name: str, entry: TensorEntry, box: Box, values: Tensor
    ) -> None:
        """Read the runs of a box into a buffer of as many bytes."""
        memory, at, size = values.numpy().data, 0, entry.dtype.itemsize
        for first, count in contiguous_runs(entry.shape, box):
            start, stop = entry.start + first * size, at + count * size
            while at < stop:  # the system may give less than was asked for
                got = os.preadv(file, [memory[at:stop]], start)
                if not got:
                    raise ConfigError(
                        f"{path} ended inside `{name}`: it has become shorter since it was opened."
                    )
                at, start = at + got, start + got
        self.bytes_read += at


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
