"""Files in the memory of several processes, each in some of them: what an fsspec URL of the scheme
`host-memory` means. Knows no Ray: `keepers` does.

    host-memory://2-3f9a/step-000020/actor/rank-00000.safetensors

The first part names the job, and before the hyphen in how many places each of its files is.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import IO, Any, ClassVar

import numpy as np
from fsspec import AbstractFileSystem

URL_SCHEME = "host-memory"
_UPLOAD_PART_BYTES = 16 << 20
"""The approximate size of a part."""


class MemoryKeeper:
    """A keeper of files in the memory of its process."""

    def __init__(self) -> None:
        self._files: dict[str, bytearray] = {}
        self._unfinished: dict[str, bytearray] = {}

    def add(self, path: str, start: int, content: np.ndarray) -> None:
        """Append the next part of a file, which is not readable before `commit`.

        Args:
            start: Where the part begins; with 0 the file is begun anew.
        """
        if start == 0:
            self._unfinished[path] = bytearray()
        if len(self._unfinished[path]) != start:
            raise ValueError(f"{path}: the part at byte {start} does not follow the one before")
        self._unfinished[path] += content.data

    def commit(self, path: str) -> None:
        """Make a file readable after its last part."""
        self._files[path] = self._unfinished.pop(path)

    def discard(self, path: str) -> None:
        """Drop the parts of an unfinished file."""
        self._unfinished.pop(path, None)

    def read(self, path: str, start: int, stop: int | None) -> np.ndarray | None:
        """Return bytes of a file; None if this keeper does not have it."""
        file = self._files.get(path)
        return None if file is None else np.frombuffer(memoryview(file)[start:stop], np.uint8)

    def sizes(self, path: str) -> dict[str, int]:
        """Return the size of the file of this name, or of each file below the folder."""
        return {name: len(file) for name, file in self._files.items() if _is_below(name, path)}

    def remove(self, path: str) -> None:
        """Remove the file, or the folder with its files, and unfinished files there."""
        for files in (self._files, self._unfinished):
            for name in [name for name in files if _is_below(name, path)]:
                del files[name]


class KeeperFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system over several keepers. A file is written to several of them and read from any
    that has it, so that one keeper may be lost."""

    protocol: ClassVar[str] = URL_SCHEME

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._known: dict[str, Any] = {}
        """The keeper that has a file, by its path."""

    @abstractmethod
    def keepers(self, job: str) -> list[Any]:
        """Return the keepers of a job that are alive: that of this process's node first, then the
        others in a ring that all processes share."""

    @abstractmethod
    def ask(self, keepers: Sequence[Any], method: str, *arguments: Any) -> list[Any]:
        """Call a method of each keeper, and return what it returned or, as an `OSError`, why it
        failed."""

    def tell(self, keepers: Sequence[Any], method: str, *arguments: Any) -> None:
        """Call a method without a result on each keeper.

        Raises:
            OSError: if one could not be called.
        """
        for answer in self.ask(keepers, method, *arguments):
            if answer is not None:
                raise answer

    def open(self, path: str, mode: str = "rb", **_: Any) -> IO[bytes] | KeeperUpload:
        path = self._strip_protocol(path)
        return io.BytesIO(self.cat_file(path)) if mode == "rb" else self._upload(path)

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        sending = self._upload(self._strip_protocol(path))
        sending.write(value)
        sending.close()
        sending.commit()

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        path = self._strip_protocol(path)
        for keeper in self._candidates(path):
            (content,) = self.ask([keeper], "read", path, start or 0, end)
            if content is not None and not isinstance(content, OSError):
                self._known[path] = keeper
                found: bytes = content.tobytes()
                return found
        raise FileNotFoundError(path)

    def find(self, path: str, detail: bool = False, **_: Any) -> Any:
        path, found = self._strip_protocol(path), dict[str, int]()
        keepers = self.keepers(path.partition("/")[0])
        for keeper, sizes in zip(keepers, self.ask(keepers, "sizes", path), strict=True):
            for name, size in {} if isinstance(sizes, OSError) else sizes.items():
                if name not in found:
                    found[name] = size
                    self._known[name] = keeper
        entries = {name: _make_entry(name, size) for name, size in sorted(found.items())}
        return entries if detail else list(entries)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        entries: dict[str, Any] = {}
        for name, entry in self.find(path, detail=True).items():
            inner = name.removeprefix(path).lstrip("/")
            child = f"{path}/{inner.partition('/')[0]}" if inner else name
            entries[child] = entry if child == name else _make_entry(child, None)
        if not entries:
            raise FileNotFoundError(path)
        return list(entries.values()) if detail else list(entries)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        found = self.find(path, detail=True)
        if not found:
            raise FileNotFoundError(path)
        return found.get(path) or _make_entry(path, None)

    def rm(self, path: str, **_: Any) -> None:  # a keeper that is lost has nothing any more
        path = self._strip_protocol(path)
        self.ask(self.keepers(path.partition("/")[0]), "remove", path)

    def rm_file(self, path: str) -> None:
        self.rm(path)

    def _upload(self, path: str) -> KeeperUpload:
        """Begin to send a file to as many keepers as its job says."""
        job = path.partition("/")[0]
        holders = self.keepers(job)[: int(job.partition("-")[0])]
        if not holders:
            raise OSError("no process that keeps copies is left")
        return KeeperUpload(self, holders, path)

    def _candidates(self, path: str) -> Iterator[Any]:
        """Yield the keepers that may have a file, the one that had it last first."""
        if (known := self._known.pop(path, None)) is not None:
            yield known
        yield from self.keepers(path.partition("/")[0])


class KeeperUpload:
    """An upload of a file to several keepers.

    Args:
        holders: Those that are to have it.
    """

    def __init__(self, files: KeeperFileSystem, holders: Sequence[Any], path: str) -> None:
        self._files, self._holders, self._path = files, holders, path
        self._begun, self._sent = bytearray(), 0

    def write(self, content: bytes | memoryview) -> None:
        """Send content in large parts; less is kept until there is enough."""
        self._begun += content
        if len(self._begun) >= _UPLOAD_PART_BYTES:
            self._send()

    def close(self) -> None:
        """Send the rest of the content."""
        if self._begun or not self._sent:
            self._send()

    def commit(self) -> None:
        """Make the file readable in all keepers."""
        self._files.tell(self._holders, "commit", self._path)

    def discard(self) -> None:
        """Drop the parts that were sent."""
        self._files.ask(self._holders, "discard", self._path)

    def _send(self) -> None:
        part, self._begun = np.frombuffer(self._begun, np.uint8), bytearray()
        self._files.tell(self._holders, "add", self._path, self._sent, part)
        self._sent += len(part)


def _is_below(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}/")


def _make_entry(name: str, size: int | None) -> dict[str, Any]:
    """Return the entry that fsspec expects for a file, or for a folder, which has no size."""
    kind = "directory" if size is None else "file"
    return {"name": name, "size": size or 0, "type": kind}
