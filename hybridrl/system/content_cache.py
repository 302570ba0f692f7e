"""ContentCache: values that are expensive to compute, kept under keys of all that they depend on.

The upper level is memory; the lower one is a folder that the ranks of a node, and runs, share. Each
writer appends to a segment file of its own, so that no writer waits for another, on network file
systems either, and one that is killed leaves at most one incomplete entry, the last of a file that
nobody continues. Readers build their index from the headers of the entries and read on where they
stopped. An entry names its key and has a checksum: a damaged one is not found. Both levels forget
what was written first; on disk whole segments.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import secrets
import struct
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from itertools import starmap
from pathlib import Path
from typing import Any

from hybridrl.config.schema import CacheConfig
from hybridrl.errors import ConfigError
from hybridrl.system.locations import is_url, remove_location
from hybridrl.system.storage import format_write_error

_HEADER = struct.Struct("<8s32s16sQ")  # mark, key, checksum, bytes of the value
_MARK = b"hrlcache"
_SUFFIX = ".entries"
_MEMORY_BYTES, _OVERHEAD_BYTES = 256 << 20, 200
_SEGMENTS = 16
"""About so many full segments fit into the cache; the oldest is what is forgotten at once."""
_ROOT = Path(__file__).parents[1]
_KNOWN_FOLDERS = (f"{_ROOT}/", f"{sysconfig.get_path('stdlib')}/")
_LIBRARIES = ("torch", "transformers", "peft", "vllm", "tokenizers")
_BEGAN = time.time()
"""Before a process loads the code of users. What changes later may be loaded as it was before."""
_loaded: dict[str, tuple[list[int], bytes]] = {}
"""Of files of users' modules: by what a file is known not to be another, and its hash."""


@functools.cache
def hash_installed_code() -> bytes | None:
    """Hash HybridRL's own source, the list of every installed package's files with their hashes,
    and Python's version. None: see `_hash_sources`; or a library that computes is not installed,
    but imported from its sources."""
    found = [importlib.util.find_spec(name) for name in _LIBRARIES]
    if not all(_is_installed(str(spec.origin)) for spec in found if spec is not None):
        return None
    own = _hash_sources({str(path.relative_to(_ROOT)): path for path in _ROOT.rglob("*.py")})
    installed = importlib.metadata.distributions()
    packages = sorted(repr([one.name, one.version, one.read_text("RECORD")]) for one in installed)
    return own and hash_plain(own, packages, sys.version, platform.machine())


def hash_loaded_code() -> bytes | None:
    """Hash the sources of all loaded modules that are of no installed package, which are the
    user's, and the bytecode that Python may have run instead of them. None if a file cannot be
    read, has changed since it was hashed first, or since this process began: call this as soon as
    modules are loaded."""
    found = []
    for name, module in sorted([*sys.modules.items()]):
        file = str(getattr(module, "__file__", ""))
        # Some have the name of no file, such as `torch.ops`.
        if file.startswith("/") and not _is_installed(file):
            if (digest := _hash_loaded_file(file, getattr(module, "__cached__", None))) is None:
                return None
            found.append((name, digest))
    return hash_plain(found)


def _hash_loaded_file(file: str, bytecode: str | None) -> bytes | None:
    try:
        stat = Path(file).stat()
        stamp = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        if file not in _loaded:
            if stat.st_ctime >= _BEGAN:
                return None
            known = hashlib.blake2b(Path(file).read_bytes())
            if bytecode is not None and Path(bytecode).exists():
                known.update(Path(bytecode).read_bytes())
            _loaded[file] = stamp, known.digest()
    except OSError:
        return None
    before, digest = _loaded[file]
    return digest if stamp == before else None


@functools.cache  # asked of every module for every key
def _is_installed(file: str) -> bool:
    is_package = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    return is_package or file.startswith(_KNOWN_FOLDERS)


def _hash_sources(files: Mapping[str, Path]) -> bytes | None:
    """None if one cannot be read, or has changed since this process began, so that nobody knows
    which of its contents was loaded."""
    try:
        contents = [(name, files[name].read_bytes()) for name in sorted(files)]
        is_newer = any(path.stat().st_ctime >= _BEGAN for path in files.values())
    except OSError:
        return None
    return None if is_newer else hash_plain(contents)


def hash_plain(*parts: Any) -> bytes | None:
    """Hash plain data: numbers, texts, bytes, lists, tuples, dictionaries. None if a part is
    something else, of which equal hashes would not prove that it is equal."""
    if not _is_plain(parts):
        return None
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).digest()


def _is_plain(part: Any) -> bool:
    if type(part) in (list, tuple, dict):
        return all(map(_is_plain, part.items() if type(part) is dict else part))
    return part is None or type(part) in (bool, int, float, str, bytes)


def compute_key(*parts: bytes | None) -> bytes | None:
    """Return the key of a value that depends on these parts and on all installed code. None if one
    of them is not known."""
    if None in parts or (code := hash_installed_code()) is None:
        return None
    return hash_plain(code, *parts)


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
        with contextlib.suppress(OSError):  # another process has removed it, or it is another's
            found.append((path, path.stat()))
    return found


def remove_oldest(entries: Sequence[tuple[Path, int]], max_bytes: float) -> None:
    """Remove files and folders until the others take at most `max_bytes`.

    Args:
        entries: With their sizes, the oldest first.
    """
    total = sum(size for _, size in entries)
    for path, size in entries:
        if not total > max_bytes:
            return
        remove_location(path)
        total -= size


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
        self._places: dict[bytes, tuple[Path, int, int]] = {}
        self._indexed: dict[Path, int] = {}
        self._segment = self._root / "of nothing yet"
        self._writes = True
        self.asked = self.hits = 0
        self.faults: list[str] = []

    def get_many(self, keys: Sequence[bytes | None]) -> list[bytes | None]:
        """Return the value of each key; None where there is none, and for the key None."""
        self.index()
        found = [None if key is None else self._get(key) for key in keys]
        self.asked += sum(key is not None for key in keys)
        self.hits += sum(value is not None for value in found)
        return found

    def recall(self, keys: Sequence[bytes | None]) -> tuple[dict[int, bytes], list[list[int]]]:
        """Return the values that there are by the places of their keys, and the other places, those
        of equal keys together."""
        found, unknown = dict[int, bytes](), dict[bytes | int, list[int]]()
        for place, (key, value) in enumerate(zip(keys, self.get_many(keys), strict=True)):
            if value is None:
                unknown.setdefault(key or place, []).append(place)
            else:
                found[place] = value
        return found, list(unknown.values())

    def put_many(self, values: Mapping[bytes | None, bytes]) -> None:
        """Keep values in memory and on disk, but for that of the key None."""
        entries = {key: value for key, value in values.items() if key is not None}
        for key, value in entries.items():
            self._remember(key, value)
        if not (entries and self._writes):
            return
        try:
            self._append(b"".join(starmap(_pack, entries.items())))
        except OSError as error:
            self._writes = False
            said = format_write_error(self._root, error, "cache.folder")
            self.faults.append(f"The job goes on with what its cache has in memory. {said}")

    def take_counts(self) -> dict[str, int]:
        """Return `asked` and `hits`, by the names of metrics, and count from 0 again."""
        taken = {f"cache_{self._kind}_asked": self.asked, f"cache_{self._kind}_hits": self.hits}
        self.asked = self.hits = 0
        return taken

    def index(self) -> int:
        """Bring the index up to date with the folder, and return the number of entries."""
        sizes = {path: stat.st_size for path, stat in list_segments(self._root)}
        if self._indexed.keys() - sizes.keys():  # pruned
            self._places, self._indexed = {}, {}
        for path, size in sizes.items():
            begin = self._indexed.get(path, 0)
            if path.parent.name != self._kind or size <= begin:
                continue
            with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
                for key, start, end in _iterate_entries(file, begin):
                    self._places[key] = path, start, end
                    self._indexed[path] = end
        return len(self._places)

    def _get(self, key: bytes) -> bytes | None:
        if key in self._memory:
            return self._memory[key]
        if (place := self._places.get(key)) is None:
            return None
        path, start, end = place
        content = b""
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), end - start, start)
        value = content[_HEADER.size :]
        if content != _pack(key, value):
            return None
        self._remember(key, value)
        return value

    def _remember(self, key: bytes, value: bytes) -> None:
        if key not in self._memory:
            self._memory[key] = value
            self._memory_bytes += _OVERHEAD_BYTES + len(value)
        while self._memory_bytes > min(_MEMORY_BYTES, self._max_bytes):
            oldest = self._memory.pop(next(iter(self._memory)))
            self._memory_bytes -= _OVERHEAD_BYTES + len(oldest)

    def _append(self, content: bytes) -> None:
        segment = self._segment
        if not segment.exists() or segment.stat().st_size * _SEGMENTS >= self._max_bytes:
            name = f"{time.time_ns():020}-{secrets.token_hex(4)}{_SUFFIX}"
            self._segment = segment = self._root / self._kind / name
            segment.parent.mkdir(parents=True, exist_ok=True)
        with FileIO(segment, "a") as file:
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) :]
        segments = [(path, stat.st_size) for path, stat in list_segments(self._root)]
        remove_oldest(segments, self._max_bytes)


def open_cache(config: CacheConfig | None, kind: str) -> ContentCache | None:
    """Return the cache of a kind; None if `cache.use` does not name it."""
    return ContentCache(config, kind) if config is not None and kind in config.use else None


def _iterate_entries(file: FileIO, start: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield key, start and end of the complete entries of a segment from `start` on. An incomplete
    or damaged header ends it."""
    while len(header := os.pread(file.fileno(), _HEADER.size, start)) == _HEADER.size:
        mark, key, _, length = _HEADER.unpack(header)
        end = start + _HEADER.size + length
        if mark != _MARK or end > os.fstat(file.fileno()).st_size:
            return
        yield key, start, end
        start = end


def _pack(key: bytes, value: bytes) -> bytes:
    checksum = hashlib.blake2b(key + value, digest_size=16).digest()
    return _HEADER.pack(_MARK, key, checksum, len(value)) + value
