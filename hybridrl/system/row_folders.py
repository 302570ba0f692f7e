"""The folders in which token ids of large data lie: listed, and removed when nobody uses them.

`hybridrl.data.token_cache` fills them; each holds the rows of one data set as one job reads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NamedTuple

KIND = "rows"
"""Name of the folder of the cache in which they lie."""
ROWS = "rows.arrow"
PART = ".part-"
"""Beginning of the name of a folder that a job is filling."""
_MOST_UNUSED_S, _MOST_PART_S = 30 * 86400.0, 86400.0
"""Folders that no job has opened, or that one has left incomplete, for so long are removed."""


class RowFolder(NamedTuple):
    """A folder that no job is filling.

    Attributes:
        size: Bytes of its files.
        opened: When a job opened it last, in nanoseconds since the epoch; 0: a killed job has left
            it incomplete.
    """

    path: Path
    size: int
    opened: int


@contextlib.contextmanager
def create_part(folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Create a folder to fill and its file of rows, whose lock shows that this job still lives;
    remove it after the block, unless it has another name by then."""
    with TemporaryDirectory(prefix=PART, dir=folder, ignore_cleanup_errors=True) as name:
        part = Path(name, "entry")
        part.mkdir()
        with (part / ROWS).open("wb") as rows:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(rows, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield part, rows


def list_row_folders(cache: Path) -> list[RowFolder]:
    """Return the folders of a cache that no job is filling, what killed jobs have left first, then
    that which was opened the longest ago."""
    found = []
    for path in (cache / KIND).glob("*"):
        is_part = path.name.startswith(PART)
        if is_part and not _is_abandoned(path):
            continue
        with contextlib.suppress(OSError):  # another process has removed it
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            found.append(RowFolder(path, size, 0 if is_part else path.stat().st_mtime_ns))
    return sorted(found, key=lambda one: one.opened)


def remove_unused_folders(cache: Path) -> None:
    """Remove folders that no job has opened for a month, and what killed jobs have left."""
    for path in (cache / KIND).glob("*"):
        is_part = path.name.startswith(PART)
        with contextlib.suppress(OSError):
            # A job that fills one for days writes to its file of rows.
            files = path.rglob("*") if is_part and not _is_abandoned(path) else ()
            unused = time.time() - max(place.stat().st_mtime for place in (path, *files))
            if unused > (_MOST_PART_S if is_part else _MOST_UNUSED_S):
                shutil.rmtree(path)


def _is_abandoned(part: Path) -> bool:
    """Return whether the job that was filling a folder is known to be gone: its lock is free."""
    try:
        with (part / "entry" / ROWS).open("r+b") as rows:
            fcntl.flock(rows, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
