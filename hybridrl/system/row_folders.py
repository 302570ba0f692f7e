"""The folders in which token ids of large data lie: listed, and removed when nobody uses them.

`hybridrl.data.token_cache` fills them; each holds the rows of one data set as one job reads it.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import NamedTuple

KIND = "rows"
"""Name of the folder of the cache in which they lie."""
PART = ".part-"
"""Beginning of the name of a folder that a job is filling."""
_MOST_UNUSED_S, _MOST_PART_S = 30 * 86400.0, 86400.0
"""Folders that no job has opened, or that one has left incomplete, for so long are removed."""


class RowFolder(NamedTuple):
    """A complete folder.

    Attributes:
        size: Bytes of its files.
        opened: When a job opened it last, in nanoseconds since the epoch.
    """

    path: Path
    size: int
    opened: int


def list_row_folders(cache: Path) -> list[RowFolder]:
    """Return the complete folders of a cache, that which was opened the longest ago first."""
    found = []
    for path in (cache / KIND).glob("*"):
        if path.name.startswith(PART):
            continue
        with contextlib.suppress(OSError):  # another process has removed it
            size = sum(file.stat().st_size for file in path.iterdir())
            found.append(RowFolder(path, size, path.stat().st_mtime_ns))
    return sorted(found, key=lambda one: one.opened)


def remove_unused_folders(cache: Path) -> None:
    """Remove folders that no job has opened for a month, and what killed jobs have left."""
    for path in (cache / KIND).glob("*"):
        most = _MOST_PART_S if path.name.startswith(PART) else _MOST_UNUSED_S
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > most:
                shutil.rmtree(path)
