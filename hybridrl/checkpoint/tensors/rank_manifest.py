"""The manifest that each rank writes beside shared tensor files: its boxes and their checksums.

A rank leaves a list, `rank-00003.json`, beside the files. Every byte of a file is either of its
header or of one box in one list, so the lists tell, without reading anything back, whether all has
been written, and later whether all is still as it was.

At a URL nobody writes into the middle of a file. There each rank has a file of its own with its
boxes, `rank-00003.safetensors`, and the lists say which parts they are of which files.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, NamedTuple

from hybridrl.errors import ConfigError
from hybridrl.layout.boxes import Box, box_numel, contiguous_runs
from hybridrl.system.bounded_files import parse_json, read_text
from hybridrl.system.locations import Location, list_file_sizes, open_range_reader

DTYPE_BYTES = {
    **{"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1},
}
"""Of the number formats that are written, by the names that safetensors headers use."""
MANIFEST_PATTERN = "rank-*.json"
CARRIED = "carried"
"""In the plain numbers of a state: names of the tensors that are as the model's own files have
them."""
_MOST_LIST_BYTES = 1 << 30
_READ_BYTES = 4 << 20
_READERS = 4
"""Boxes that are checked at once, most of the time without Python's lock."""


class WrittenBox(NamedTuple):
    """A box of a tensor in a file.

    Attributes:
        tensor: Its name in the file.
        dtype: A key of `DTYPE_BYTES`.
        shape: Of the whole tensor.
        box: Which part.
        file: Name of the file, in the folder of the list.
        offset: The byte of the file where the values of the whole tensor begin.
        crc32: Of the values of the box, in the order of its elements.
        own_start: Where they begin, one after the other, in the file of the rank that wrote them;
            None: they are in `file`.
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    file: str
    offset: int
    crc32: int
    own_start: int | None = None

    @property
    def size(self) -> int:
        """The number of bytes."""
        return box_numel(self.box) * DTYPE_BYTES[self.dtype]

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the byte ranges of its values: the first byte and the number of bytes of each
        run."""
        if self.own_start is not None:
            yield self.own_start, self.size
            return
        size = DTYPE_BYTES[self.dtype]
        for first, count in contiguous_runs(self.shape, self.box):
            yield self.offset + first * size, count * size


class WrittenHeader(NamedTuple):
    """The header of a tensor file.

    Attributes:
        size: Bytes.
        crc32: Of these.
        length: Of the whole file, bytes.
    """

    size: int
    crc32: int
    length: int


@dataclass(frozen=True)
class RankManifest:
    """The manifest of one rank: the boxes and headers that it wrote.

    Attributes:
        boxes: Of tensors.
        headers: By file; only one rank writes them.
        steps: By parameter of which it wrote a box: the optimizer's count of its steps; None before
            the first.
        own: The file of its own by its name, at URLs; the files of `headers` are not there then.
    """

    boxes: Sequence[WrittenBox]
    headers: Mapping[str, WrittenHeader] = field(default_factory=dict)
    steps: Mapping[str, float | None] = field(default_factory=dict)
    own: Mapping[str, WrittenHeader] = field(default_factory=dict)

    def file_of(self, box: WrittenBox) -> str:
        """Return the name of the file that holds the values of one of its boxes."""
        return box.file if box.own_start is None else next(iter(self.own))

    def to_json(self) -> str:
        """Format the manifest as the JSON of its file."""
        headers, own = (
            {file: header._asdict() for file, header in files.items()}
            for files in (self.headers, self.own)
        )
        boxes = [box._asdict() for box in self.boxes]
        return json.dumps(
            {"headers": headers, "own": own, "steps": dict(self.steps), "boxes": boxes}
        )

    @classmethod
    def from_json(cls, text: str) -> RankManifest:
        """Parse the JSON of `to_json`.

        Raises:
            ValueError: if it is something else.
        """
        try:
            read = parse_json(text)
            headers, own = (
                {file: WrittenHeader(**found) for file, found in read[kind].items()}
                for kind in ("headers", "own")
            )
            return cls([_box(box) for box in read["boxes"]], headers, dict(read["steps"]), own)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is no list of boxes ({error})") from error


class SaveResult(NamedTuple):
    """The result of a rank's save: bytes written and seconds taken.

    Attributes:
        bytes: Of tensors.
        seconds: From the beginning of the writing until everything was on the disk.
        copy_seconds: From then until a copy was in the memory of nodes; 0 if none was wanted.
        copy_fault: Why there is none, though it was wanted; else empty.
    """

    bytes: int
    seconds: float
    copy_seconds: float = 0.0
    copy_fault: str = ""


def manifest_path(folder: Location, rank: int) -> Location:
    """Return the path of a rank's manifest."""
    return folder / MANIFEST_PATTERN.replace("*", f"{rank:05}")


def is_list(name: str) -> bool:
    """Return whether this is the name of such a list."""
    return fnmatch(name, MANIFEST_PATTERN)


def read_manifests(folder: Location) -> list[RankManifest]:
    """Read the manifests of all ranks in a folder; an empty list if it has none.

    Raises:
        OSError, ValueError: if one cannot be read; names it.
    """
    found = []
    for name in filter(is_list, list_file_sizes(folder)):
        try:
            found.append(RankManifest.from_json(read_text(folder / name, _MOST_LIST_BYTES)))
        except ValueError as error:
            raise ValueError(f"{folder / name}: {error}") from error
    return found


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


def list_stems(lists: Iterable[RankManifest]) -> set[str]:
    """Return what the names of the tensor files begin with, such as `model` and `moments`."""
    return {box.file.split(".")[0].split("-")[0] for one in lists for box in one.boxes}


def list_written_files(lists: Iterable[RankManifest]) -> dict[str, WrittenHeader]:
    """Return the header of every file that was written, by file name."""
    apart = any(one.own for one in lists)
    return {
        file: header
        for one in lists
        for file, header in (one.own if apart else one.headers).items()
    }


def find_missing_data(folder: Location, lists: Sequence[RankManifest]) -> str:
    """Return a sentence about the first file that was not written completely; empty if all were.
    Reads no tensor file."""
    headers = {file: header for one in lists for file, header in one.headers.items()}
    if not headers:
        return f"{folder} has no list of its first rank, {manifest_path(folder, 0).name}"
    written = Counter({file: header.size for file, header in headers.items()})
    for one in lists:
        for box in one.boxes:
            written[box.file] += box.size
    sizes, files = list_file_sizes(folder), list_written_files(lists)
    for file, header in {**headers, **files}.items():
        found = sizes.get(file, 0) if file in files else header.length
        listed = written.get(file, header.length)
        if not listed == found == header.length:
            return (
                f"{folder / file} has {found} of its {header.length} bytes, of which ranks say "
                f"that they wrote {listed}"
            )
    return ""


def find_damage(folder: Location, lists: Sequence[RankManifest]) -> str:
    """Return a sentence about the first file that differs from what was written; empty if none
    does. Reads all files."""
    checks: list[tuple[str, str, Iterable[tuple[int, int]], int]] = [
        (file, "its header", [(0, header.size)], header.crc32)
        for file, header in list_written_files(lists).items()
    ]
    checks += [
        (one.file_of(box), f"`{box.tensor}`", box.ranges(), box.crc32)
        for one in lists
        for box in one.boxes
    ]
    with ThreadPoolExecutor(_READERS) as readers:
        found = readers.map(lambda check: crc32_of(folder / check[0], check[2]) == check[3], checks)
        for (file, what, _, _), is_same in zip(checks, found, strict=True):
            if not is_same:
                readers.shutdown(wait=False, cancel_futures=True)
                return f"{folder / file} is not what was written (the crc32 of {what} differs)"
    return ""


def crc32_of(file: Location, ranges: Iterable[tuple[int, int]]) -> int:
    found = 0
    with open_range_reader(file) as read:
        for start, size in ranges:
            for at in range(start, start + size, _READ_BYTES):
                found = zlib.crc32(read(at, min(_READ_BYTES, start + size - at)), found)
    return found


def _box(read: Any) -> WrittenBox:
    read["shape"], read["box"] = tuple(read["shape"]), tuple(map(tuple, read["box"]))
    found = WrittenBox(**read)
    sides = [len(side) for side in found.box]
    if found.dtype not in DTYPE_BYTES or sides != [2] * len(found.shape):
        raise KeyError(f"`{found.tensor}`")
    return found
