"""ContentCache: values that are expensive to compute, kept under keys of all that they depend on.

The upper level is memory; the lower one is a folder that the ranks of a node, and runs, share. Each
writer appends to a segment file of its own, so that no writer waits for another, on network file
systems either, and one that is killed leaves at most one incomplete entry, the last of a file that
nobody continues. Readers build their index from the headers of the entries and read on where they
stopped. An entry names its key and has a checksum: a damaged one is not found. Both levels forget
what was written first; on disk whole segments.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import marshal
import os
import platform
import secrets
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from hybridrl.config.schema import CacheConfig
from hybridrl.errors import ConfigError
from hybridrl.system.locations import is_still_at, is_url

_HEADER = struct.Struct("<8s32s16sQ")  # mark, key, checksum, bytes of the value
_MARK = b"hrlcache"
_SUFFIX = ".entries"
_MEMORY_BYTES = 256 << 20
_SEGMENTS = 16
"""About so many full segments fit into the cache; the oldest is what is forgotten at once."""


@functools.cache
def hash_code_version() -> bytes:
    """Hash HybridRL's own source, the versions of all installed packages, and Python's."""
    root, digest = Path(__file__).parents[1], hashlib.blake2b()
    for file in sorted(root.rglob("*.py")):
        source = file.read_bytes()
        digest.update(f"{file.relative_to(root)} {len(source)} ".encode() + source)
    packages = sorted(f"{one.name} {one.version}" for one in importlib.metadata.distributions())
    digest.update(repr([packages, sys.version, platform.machine()]).encode())
    return digest.digest()


def hash_loaded_sources() -> bytes:
    """Hash the source of every imported module that is of no installed package: the user's code."""
    digest = hashlib.blake2b()
    files = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    for file in sorted(files):
        if file.endswith(".py") and not {"site-packages", "dist-packages"} & {*Path(file).parts}:
            digest.update(hashlib.blake2b(Path(file).read_bytes()).digest())
    return digest.digest()


def compute_key(*parts: Any) -> bytes | None:
    """Return the key of a value that depends on these parts, on HybridRL and on the installed
    packages. None if a part is no plain data (numbers, texts, bytes, lists, tuples, dictionaries),
    so that equal keys would not prove equal parts."""
    try:
        # Version 2, because what later ones write depends on how often an object is referred to.
        content = marshal.dumps((hash_code_version(), *parts), 2)
    except ValueError:
        return None
    return hashlib.blake2b(content, digest_size=32).digest()


def find_cache_folder(config: CacheConfig) -> Path:
    """Return `cache.folder`, by default `$XDG_CACHE_HOME/hybridrl`.

    Raises:
        ConfigError: if it is a URL.
    """
    if is_url(config.folder or ""):
        raise ConfigError(
            f"cache.folder={config.folder}: must be a folder, because entries are appended to its "
            "files. Set it to one on a disk or a network file system."
        )
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(config.folder or f"{home}/hybridrl").expanduser()


def list_segments(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """Return the segments of all kinds, the oldest first."""
    found = []
    for path in sorted(folder.glob(f"*/*{_SUFFIX}"), key=lambda path: path.name):
        try:
            found.append((path, path.stat()))
        except OSError:  # another process has removed it, or it is another user's
            continue
    return found


def prune_segments(folder: Path, max_bytes: float) -> None:
    """Remove the oldest segments until the others take at most `max_bytes`."""
    segments = list_segments(folder)
    total = sum(stat.st_size for _, stat in segments)
    for path, stat in segments:
        if total <= max_bytes:
            return
        path.unlink(missing_ok=True)
        total -= stat.st_size


def iterate_entries(file: BinaryIO, start: int = 0) -> Iterator[tuple[bytes, int, int]]:
    """Yield key, start and end of the complete entries of a segment from `start` on. An incomplete
    or damaged header ends it."""
    size = os.fstat(file.fileno()).st_size
    while start + _HEADER.size <= size:
        mark, key, _, length = _HEADER.unpack(os.pread(file.fileno(), _HEADER.size, start))
        end = start + _HEADER.size + length
        if mark != _MARK or end > size:
            return
        yield key, start, end
        start = end


class ContentCache:
    """The values of one kind. Any number of instances share a folder. A folder that cannot be
    written, such as one on a full disk, ends writing there, and memory goes on.

    Args:
        kind: The name of the kind, which is its folder's.

    Attributes:
        asked, hits: Values that were looked up, and those that need not be computed.
        faults: Why nothing is written any more, for the user; whoever reports it clears it.
    """

    def __init__(self, config: CacheConfig, kind: str) -> None:
        self._root, self._kind = find_cache_folder(config), kind
        self._max_bytes = config.max_gib * 2**30
        self._memory: dict[bytes, bytes] = {}
        self._memory_bytes = 0
        self._places: dict[bytes, tuple[Path, int]] = {}
        self._scanned: dict[Path, int] = {}
        self._segment: FileIO | None = None
        self.asked = self.hits = 0
        self._writes = True
        self.faults: list[str] = []

    def get_many(self, keys: Sequence[bytes | None]) -> list[bytes | None]:
        """Return the value of each key; None where there is none, and for the key None."""
        self._scan()
        found = [None if key is None else self._get(key) for key in keys]
        self.asked += len(keys)
        self.hits += sum(value is not None for value in found)
        return found

    def put_many(self, values: Mapping[bytes, bytes]) -> None:
        """Keep values in memory and on disk."""
        for key, value in values.items():
            self._remember(key, value)
        if self._writes and values:
            try:
                self._append(b"".join(_pack(key, value) for key, value in values.items()))
            except OSError as error:
                self._writes = False
                self.faults.append(
                    f"The cache in {self._root} (cache.folder) cannot be written: {error}. The job "
                    "goes on with what is in memory. Free some space, or set cache.folder to a "
                    "folder that can be written."
                )

    def take_counts(self) -> dict[str, int]:
        """Return `asked` and `hits`, by the names of metrics, and count from 0 again."""
        taken = {f"cache_{self._kind}_asked": self.asked, f"cache_{self._kind}_hits": self.hits}
        self.asked = self.hits = 0
        return taken

    def _get(self, key: bytes) -> bytes | None:
        if key in self._memory:
            return self._memory[key]
        if (place := self._places.get(key)) is None:
            return None
        path, start = place
        try:
            with path.open("rb", buffering=0) as file:
                header = os.pread(file.fileno(), _HEADER.size, start)
                length = _HEADER.unpack(header)[3]
                available = os.fstat(file.fileno()).st_size - start - _HEADER.size
                value = os.pread(
                    file.fileno(), min(length, max(0, available)), start + _HEADER.size
                )
        except (OSError, struct.error):
            header, value = b"", b""
        if header + value != _pack(key, value):
            del self._places[key]
            return None
        self._remember(key, value)
        return value

    def _remember(self, key: bytes, value: bytes) -> None:
        self._memory_bytes += len(value) - len(self._memory.pop(key, b""))
        self._memory[key] = value
        while self._memory_bytes > min(_MEMORY_BYTES, self._max_bytes):
            self._memory_bytes -= len(self._memory.pop(next(iter(self._memory))))

    def _scan(self) -> None:
        """Bring the index up to date with the folder."""
        segments = {path: stat.st_size for path, stat in list_segments(self._root)}
        if self._scanned.keys() - segments.keys():  # pruned
            self._places = {k: place for k, place in self._places.items() if place[0] in segments}
            self._scanned = {path: end for path, end in self._scanned.items() if path in segments}
        for path, size in segments.items():
            if path.parent.name != self._kind or size <= self._scanned.get(path, 0):
                continue
            try:
                with path.open("rb", buffering=0) as file:
                    for key, start, end in iterate_entries(file, self._scanned.get(path, 0)):
                        self._places[key] = path, start
                        self._scanned[path] = end
            except (OSError, struct.error):
                continue

    def _append(self, content: bytes) -> None:
        if self._segment is not None:
            is_full = os.fstat(self._segment.fileno()).st_size * _SEGMENTS >= self._max_bytes
            if is_full or not is_still_at(self._segment.fileno(), Path(str(self._segment.name))):
                self._segment.close()
                self._segment = None
        if self._segment is None:
            folder = self._root / self._kind
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{time.time_ns():020}-{secrets.token_hex(4)}{_SUFFIX}"
            self._segment = FileIO(folder / name, "x")
        rest = memoryview(content)
        while rest:
            rest = rest[self._segment.write(rest) :]
        prune_segments(self._root, self._max_bytes)


def open_cache(config: CacheConfig | None, kind: str) -> ContentCache | None:
    """Return the cache of a kind; None if `cache.use` does not name it."""
    return ContentCache(config, kind) if config is not None and kind in config.use else None


def _pack(key: bytes, value: bytes) -> bytes:
    checksum = hashlib.blake2b(key + value, digest_size=16).digest()
    return _HEADER.pack(_MARK, key, checksum, len(value)) + value
