"""Atomic replacement of files and folders, and sentences about failed writes with a cure."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridrl.errors import StorageError
from hybridrl.system.formatting import format_bytes
from hybridrl.system.locations import (
    UNREACHABLE_HINT,
    Location,
    RemotePath,
    find_free_bytes,
    writing_beside,
)
from hybridrl.system.redaction import redact

_NUMBER = re.compile(r"\(os error (\d+)\)")
"""How Rust ends the text of such a failure."""


@contextmanager
def translate_os_errors() -> Iterator[None]:
    """Raise an `OSError` in place of the exceptions of Rust libraries (safetensors, tokenizers)
    when a disk is full or not writable. Their own exceptions are recognised by the text."""
    try:
        yield
    except Exception as error:
        found = _NUMBER.search(str(error))
        if isinstance(error, OSError) or found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from error


def to_json(value: Any, indent: int | None = None) -> str:
    """Renders `value`; numbers of NumPy and torch become plain, anything unknown its `str`,
    and secrets `***`."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        # A lone surrogate cannot be encoded; it would make the write fail later.
        return redact(value).encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # one NumPy or torch number
        return _plain(value.item())
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return _plain(str(value))


RUN_FOLDER_SETTINGS = "`run.root` or `run.directory`"
"""The settings that most of what is written is from."""
DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM}
_NOT_FULL_BYTES = 64 * 1024**2  # with more than this free, "disk full" means a quota or the inodes


@contextlib.contextmanager
def explain_write_errors(path: Location, setting: str = RUN_FOLDER_SETTINGS) -> Iterator[None]:
    """Raise `StorageError`, naming `path` and its setting, in place of an `OSError` in the
    block."""
    try:
        with translate_os_errors():
            yield
    except OSError as error:
        raise StorageError(format_write_error(path, error, setting)) from error


def format_write_error(path: Location, error: OSError, setting: str = RUN_FOLDER_SETTINGS) -> str:
    """Return a sentence: what could not be written, why, how much space is free, what to set."""
    if isinstance(path, RemotePath):
        return f"Cannot write {path}: {error}. {UNREACHABLE_HINT}"
    free = find_free_bytes(path)
    space = "free space unknown" if free is None else f"{format_bytes(free)} free there"
    cure = f"Set {setting} to a folder that you can write to."
    if error.errno in DISK_FULL_ERRNOS:
        why = "the disk is full"
        if free is not None and free > _NOT_FULL_BYTES:
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
def replace_file(path: Path, setting: str = RUN_FOLDER_SETTINGS) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and rename it to `path` when the block succeeds.

    A reader of `path` sees the old content or the new, never half of it.

    Raises:
        StorageError: the file could not be written; the temporary file is removed. Or there is a
            device or a pipe, such as /dev/null, which a rename would put out of the world for all.
    """
    with explain_write_errors(path, setting):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise StorageError(
                f"{path} is no file but a device or a pipe, and is left as it is. Set {setting} to "
                "a file that may be replaced."
            )
        with writing_beside(path) as part:
            yield part


@contextlib.contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Replace a folder as `replace_file` does a file; other processes may fill it until the block
    ends. The old folder is moved away first, so for a moment there is none, but never a mixture or
    half of one.

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
