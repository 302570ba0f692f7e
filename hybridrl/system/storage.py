"""Turns what the operating system says about a failed write into a sentence with a cure."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hybridrl.errors import StorageError
from hybridrl.system.formatting import readable_bytes
from hybridrl.system.locations import UNREACHABLE, Location, RemotePath, free_bytes
from hybridrl.system.os_errors import as_os_errors

RUN_FOLDER = "`run.root` or `run.directory`"
"""The settings that most of what is written is from."""
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM}
_ROOMY_BYTES = 64 * 1024**2  # with more than this free, "disk full" means a quota or the inodes


@contextlib.contextmanager
def explain_write_errors(path: Location, setting: str = RUN_FOLDER) -> Iterator[None]:
    """Raises `StorageError`, naming `path` and the setting that it is from, in place of an
    `OSError` while `path` is written."""
    try:
        with as_os_errors():
            yield
    except OSError as error:
        raise StorageError(write_error_sentence(path, error, setting)) from error


def write_error_sentence(path: Location, error: OSError, setting: str = RUN_FOLDER) -> str:
    """Says what could not be written, why, how much space is free there, and what to set."""
    if isinstance(path, RemotePath):
        return f"Cannot write {path}: {error}. {UNREACHABLE}"
    free = free_bytes(path)
    space = "free space unknown" if free is None else f"{readable_bytes(free)} free there"
    cure = f"Set {setting} to a folder that you can write to."
    if error.errno in DISK_FULL:
        why = "the disk is full"
        if free is not None and free > _ROOMY_BYTES:
            why = "the system says that the disk is full, by a quota or by the number of files"
        cure = f"Free some space, or set {setting} to a folder on another disk."
    elif error.errno == errno.EROFS:
        why = "the file system is read-only"
    elif error.errno in _FORBIDDEN:
        why = "this user may not write there"
    else:
        why = error.strerror or str(error)
    return f"Cannot write {path}: {why} ({space}). {cure}"


@contextlib.contextmanager
def replacing(path: Path, setting: str = RUN_FOLDER) -> Iterator[Path]:
    """Yields a temporary path beside `path`; renames it to `path` when the block succeeds.

    A reader of `path` sees the old content or the new, never half of it.

    Raises:
        StorageError: the file could not be written; the temporary file is removed. Or there is a
            device or a pipe, such as /dev/null, which a rename would put out of the world for all.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with explain_write_errors(path, setting):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise StorageError(
                f"{path} is no file but a device or a pipe, and is left as it is. Set {setting} to "
                "a file that may be replaced."
            )
        try:
            yield part
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """As `replacing`, for a folder, which other processes may fill until the block ends. The old
    one is moved away first, so that there is none for a moment, but never a mixture or a half.

    Raises:
        StorageError: the folder could not be written; the temporary one is removed.
    """
    part, old = (path.with_name(f".{path.name}.{end}") for end in ("part", "old"))
    with explain_write_errors(path):
        shutil.rmtree(part, ignore_errors=True)  # of a job that was killed
        try:
            yield part
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)
                path.rename(old)
            part.rename(path)
        finally:
            for left in (part, old):
                shutil.rmtree(left, ignore_errors=True)
