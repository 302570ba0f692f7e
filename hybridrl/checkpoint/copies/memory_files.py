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

SCHEME = "host-memory"
_PART_BYTES = 16 << 20
"""What is sent at once, about."""


class Keeper:
    """One of the processes."""

    def __init__(self) -> None:
        self._files: dict[str, bytearray] = {}
        self._unfinished: dict[str, bytearray] = {}

    def add(self, path: str, start: int, content: np.ndarray) -> None:
        """Takes the next part of a file, which is not there before `commit`.

        Args:
            start: Where the part begins; with 0 the file is begun anew.
        """
        if start == 0:
            self._unfinished[path] = bytearray()
        if len(self._unfinished[path]) != start:
            raise ValueError(f"{path}: the part at byte {start} does not follow the one before")
        self._unfinished[path] += memoryview(content)

    def commit(self, path: str) -> None:
        """The file is whole now."""
        self._files[path] = self._unfinished.pop(path)

    def discard(self, path: str) -> None:
        """Forgets the parts of a file."""
        self._unfinished.pop(path, None)

    def read(self, path: str, start: int, stop: int | None) -> np.ndarray | None:
        """Bytes of a file; None if it is not here."""
        file = self._files.get(path)
        return None if file is None else np.frombuffer(memoryview(file)[start:stop], np.uint8)

    def sizes(self, path: str) -> dict[str, int]:
        """The sizes of the file of this name, or of those below the folder."""
        return {name: len(file) for name, file in self._files.items() if _is_below(name, path)}

    def remove(self, path: str) -> None:
        """Removes the file, or the folder with what is in it, and what is unfinished there."""
        for files in (self._files, self._unfinished):
            for name in [name for name in files if _is_below(name, path)]:
                del files[name]


class KeptFiles(AbstractFileSystem):
    """The files of keepers, as one file system. What is written goes to several of them; what is
    read comes from any that has it, so that one may be lost."""

    protocol: ClassVar[str] = SCHEME

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._known: dict[str, Any] = {}
        """The keeper that has a file, by its path."""

    @abstractmethod
    def keepers(self, job: str) -> list[Any]:
        """The keepers of a job that are alive: that of this process's node first, and then in a
        ring that all processes know."""

    @abstractmethod
    def ask(self, keepers: Sequence[Any], method: str, *arguments: Any) -> list[Any]:
        """Calls a method of each; gives what it returned or, as an `OSError`, why it did not."""

    def tell(self, keepers: Sequence[Any], method: str, *arguments: Any) -> None:
        """As `ask`, for methods that have no answer.

        Raises:
            OSError: if one could not be called.
        """
        for answer in self.ask(keepers, method, *arguments):
            if answer is not None:
                raise answer

    def open(self, path: str, mode: str = "rb", **_: Any) -> IO[bytes] | Sending:
        path = self._strip_protocol(path)
        if mode == "rb":
            return io.BytesIO(self.cat_file(path))
        job = path.partition("/")[0]
        holders = self.keepers(job)[: int(job.partition("-")[0])]
        if not holders:
            raise OSError("no process that keeps copies is left")
        return Sending(self, holders, path)

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        sending = self.open(path, "wb")
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
                return content.tobytes()
        raise FileNotFoundError(path)

    def find(self, path: str, detail: bool = False, **_: Any) -> Any:
        path, found = self._strip_protocol(path), dict[str, int]()
        keepers = self.keepers(path.partition("/")[0])
        for keeper, sizes in zip(keepers, self.ask(keepers, "sizes", path), strict=True):
            for name, size in {} if isinstance(sizes, OSError) else sizes.items():
                if name not in found:
                    found[name] = size
                    self._known[name] = keeper
        entries = {name: _entry(name, size) for name, size in sorted(found.items())}
        return entries if detail else list(entries)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        entries: dict[str, Any] = {}
        for name, entry in self.find(path, detail=True).items():
            inner = name.removeprefix(path).lstrip("/")
            child = f"{path}/{inner.partition('/')[0]}" if inner else name
            entries[child] = entry if child == name else _entry(child, None)
        if not entries:
            raise FileNotFoundError(path)
        return list(entries.values()) if detail else list(entries)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        found = self.find(path, detail=True)
        if not found:
            raise FileNotFoundError(path)
        return found.get(path) or _entry(path, None)

    def rm(self, path: str, **_: Any) -> None:  # a keeper that is lost has nothing any more
        path = self._strip_protocol(path)
        self.ask(self.keepers(path.partition("/")[0]), "remove", path)

    def rm_file(self, path: str) -> None:
        self.rm(path)

    def _candidates(self, path: str) -> Iterator[Any]:
        """Keepers that may have a file, the one that had it last first."""
        if (known := self._known.pop(path, None)) is not None:
            yield known
        yield from self.keepers(path.partition("/")[0])


class Sending:
    """A file on its way to keepers.

    Args:
        holders: Those that are to have it.
    """

    def __init__(self, files: KeptFiles, holders: Sequence[Any], path: str) -> None:
        self._files, self._holders, self._path = files, holders, path
        self._begun, self._sent = bytearray(), 0
        self.closed = False

    def write(self, content: bytes | memoryview) -> None:
        """Sends more of it, or keeps it until there is enough."""
        self._begun += content
        if len(self._begun) >= _PART_BYTES:
            self._send()

    def close(self) -> None:
        """Sends the rest."""
        if self._begun or not self._sent:
            self._send()
        self.closed = True

    def commit(self) -> None:
        """From now on the file is there."""
        self._files.tell(self._holders, "commit", self._path)

    def discard(self) -> None:
        """It will never be there."""
        self._files.ask(self._holders, "discard", self._path)

    def _send(self) -> None:
        part, self._begun = np.frombuffer(self._begun, np.uint8), bytearray()
        self._files.tell(self._holders, "add", self._path, self._sent, part)
        self._sent += len(part)


def _is_below(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}/")


def _entry(name: str, size: int | None) -> dict[str, Any]:
    """What fsspec says of a file, or of a folder, which has no size."""
    kind = "directory" if size is None else "file"
    return {"name": name, "size": size or 0, "type": kind}
