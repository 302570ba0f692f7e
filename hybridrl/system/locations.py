"""Files and folders on a disk or at a URL: the operations on both that checkpoints need.

What is on a disk is a `pathlib.Path`, what is at an fsspec URL (`s3://bucket/run`) a `RemotePath`,
which has those of pathlib's methods that are used here; the functions below do the rest. An object
store knows no rename and no writing into the middle of a file, so whoever writes a folder writes
the file last that says that it is whole.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from hybridrl.errors import ConfigError, HybridRLError, MissingPackageError, pip_install
from hybridrl.system.redaction import register_url

_UPLOAD_BYTES = 16 << 20
"""Of one part of an upload, and what a writer holds in memory; S3 takes 10,000 parts of a file."""
_OF_DISK = ("file://", "local://")
_PACKAGES = {
    "s3": pip_install("s3fs"),
    "gs": "pip install gcsfs",
    "gcs": "pip install gcsfs",
}


UNREACHABLE_HINT = (
    "See whether it can be reached from here and may be written to (address, credentials, quota), "
    "or set checkpoint.folder to another place. Checkpoints that are complete stay as they are."
)
"""What to do about a URL that cannot be written."""


class RemotePath:
    """A file or folder at a URL. Failures are `OSError`s, as those of a disk.

    Raises:
        ConfigError: if nothing is known of such URLs.
        MissingPackageError: if the package for them is not installed; names it.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        register_url(url)
        self._files, self._path = _file_system(self._url)

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._url}/{name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other._url == self._url

    def __hash__(self) -> int:
        return hash(self._url)

    @property
    def name(self) -> str:
        """The last component of the URL."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The URL of the parent folder."""
        return RemotePath(self._url.rpartition("/")[0])

    def absolute(self) -> RemotePath:
        return self

    def is_dir(self) -> bool:
        """Return whether any file lies below this URL."""
        return bool(self._files.isdir(self._path))

    def is_file(self) -> bool:
        return bool(self._files.isfile(self._path))

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the direct entries of the folder."""
        names = [entry["name"].rstrip("/") for entry in self._files.ls(self._path, detail=True)]
        return (self / name.rpartition("/")[2] for name in names if name != self._path.rstrip("/"))

    def open(self) -> IO[bytes]:
        """Open the file for sequential reading."""
        opened: IO[bytes] = self._files.open(self._path, "rb", block_size=_UPLOAD_BYTES)
        return opened

    def read_text(self, encoding: str = "utf-8") -> str:
        return bytes(self._files.cat_file(self._path)).decode(encoding)

    def write_whole(self, content: bytes) -> None:
        """Replace the content of the file."""
        self._files.pipe_file(self._path, content)

    def read_range(self, start: int, length: int) -> bytes:
        """Return `length` bytes from `start`; fewer where the file ends before."""
        return bytes(self._files.cat_file(self._path, start=start, end=start + length))

    def sizes(self) -> dict[str, int]:
        """Return the size of every file below, by its path relative to this folder."""
        try:
            found = self._files.find(self._path, detail=True)
        except FileNotFoundError:
            return {}
        first = len(self._path.rstrip("/")) + 1
        return {name[first:]: int(entry["size"]) for name, entry in found.items()}

    def remove(self) -> None:
        """Remove the file, or the folder with its contents, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(self._path, recursive=True)

    @contextlib.contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        """Open an upload in parts; the file exists once the block succeeds. What is written is
        buffered until there is enough for a part."""
        options = {"block_size": _UPLOAD_BYTES, "autocommit": False}
        file = self._files.open(self._path, "wb", **options)
        guarded: Any = _RaisingOSErrors(file)
        try:
            yield guarded
            guarded.close()
            guarded.commit()
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()
                file.closed = True  # otherwise it would be sent when it is collected
            with contextlib.suppress(Exception):
                self._files.rm_file(self._path)  # file systems without uploads in parts
            raise


Location = Path | RemotePath
"""A file or a folder."""


def parse_location(text: str | Path) -> Location:
    """Parse a setting into a local path or a URL.

    Raises:
        ConfigError: if it names nothing, or nothing is known of such URLs.
        MissingPackageError: if the package for them is not installed.
    """
    text = str(text)
    remote = is_url(text)
    for scheme in _OF_DISK:
        text = text.removeprefix(scheme)
    path = text.partition("://")[2].strip("/") if remote else text
    if not path.strip() or "\0" in path:
        raise ConfigError(
            f"{text!r} names no folder. Give a path, or a URL with a bucket: s3://bucket/runs/mine."
        )
    return RemotePath(text) if remote else Path(text).expanduser()


def is_url(text: str) -> bool:
    """Return whether a text is a URL and not a local path."""
    return "://" in text and not text.startswith(_OF_DISK)


def list_file_sizes(folder: Location) -> dict[str, int]:
    """Return the size of every file below a folder, by its relative path, sorted."""
    if isinstance(folder, RemotePath):
        return dict(sorted(folder.sizes().items()))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def open_reader(file: Location) -> IO[bytes]:
    """Open a file for sequential reading."""
    return file.open() if isinstance(file, RemotePath) else file.open("rb")


@contextlib.contextmanager
def open_range_reader(file: Location) -> Iterator[Callable[[int, int], bytes]]:
    """Yield a function that reads `length` bytes at `start` of a file; fewer where it ends."""
    if isinstance(file, RemotePath):
        yield file.read_range
        return
    with file.open("rb", buffering=0) as opened:
        yield lambda start, length: os.pread(opened.fileno(), length, start)


def write_atomically(file: Location, content: bytes) -> None:
    """Write a small file atomically and wait until it is on the disk.

    Raises:
        OSError: if that fails.
    """
    if isinstance(file, RemotePath):
        file.write_whole(content)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with writing_beside(file) as part, part.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    sync_directory(file.parent)


@contextlib.contextmanager
def writing_beside(file: Path) -> Iterator[Path]:
    """Yield a temporary path beside a file, and rename it to the file when the block succeeds."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def remove_location(location: Location) -> None:
    """Remove a file, or a folder with its contents, if it exists."""
    if isinstance(location, RemotePath):
        location.remove()
    elif location.is_dir():
        shutil.rmtree(location)
    else:
        location.unlink(missing_ok=True)


def find_free_bytes(path: Path) -> int | None:
    """Return the free bytes on the disk of `path`, or of its nearest existing parent; None if
    unknown."""
    for folder in (path, *path.absolute().parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None


def copy_files(source: Location, target: Location, names: Iterable[str] | None = None) -> None:
    """Copy the files of a folder, those in subfolders included.

    Args:
        names: From there; None: all of them.

    Raises:
        OSError: if that fails.
    """
    for name in list_file_sizes(source) if names is None else names:
        file = target / name
        if isinstance(file, Path):
            file.parent.mkdir(parents=True, exist_ok=True)
        opened = file.open("wb") if isinstance(file, Path) else file.writing()
        with open_reader(source / name) as read, opened as written:
            while block := read.read(_UPLOAD_BYTES):
                written.write(block)


def access_errors(folders: Mapping[str, str], writes: Collection[str]) -> dict[str, str]:
    """Return why this process cannot use folders, by setting; only those that it cannot use.

    Args:
        folders: Paths and URLs, by setting.
        writes: Settings whose folders are written to: a small file is written, read and removed.
    """
    found = {}
    for setting, named in folders.items():
        try:
            folder = parse_location(named)
            if setting not in writes:
                next(iter(folder.iterdir()), None)
                continue
            probe, content = folder / f".probe-{secrets.token_hex(8)}", secrets.token_bytes(16)
            try:
                write_atomically(probe, content)
                with open_reader(probe) as file:
                    if file.read() != content:
                        raise OSError("what was written there is not what is read")
            finally:
                remove_location(probe)
        except (OSError, HybridRLError) as error:
            found[setting] = str(error)
    return found


def is_still_at(file: int, path: Path) -> bool:
    """Return whether an open file is the one at a path, and has not been removed or replaced."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def sync_directory(folder: Path) -> None:
    """Wait until the entries of a folder are on the disk (fsync of the directory)."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, whose methods raise `OSError`s, and the path there."""
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    try:
        files, path = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        cure = _PACKAGES.get(scheme, str(error))
        raise MissingPackageError(f"{url} needs a package that is not here: {cure}.") from error
    except ValueError as error:
        raise ConfigError(
            f"{url}: nothing is known of {scheme}:// here ({error}). Use a folder, or a URL that "
            "fsspec knows: s3://, gs://, az://, memory://."
        ) from error
    return _RaisingOSErrors(files), path


class _RaisingOSErrors:
    """A file system or file of fsspec, whose methods raise `OSError` in place of its own kinds of
    exceptions."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what pickling and copying ask for before there is an `_inner`
            raise AttributeError(name)
        method = getattr(self._inner, name)

        def guarded(*arguments: Any, **options: Any) -> Any:
            try:
                return method(*arguments, **options)
            except (OSError, HybridRLError):
                raise
            except Exception as error:
                raise OSError(f"{type(error).__name__}: {error}") from error

        return guarded
