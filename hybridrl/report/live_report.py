"""A live report whose parts are rebuilt when their files change, each using at most 5% of a
core."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.report.report_content import ReportContent
from hybridrl.run_files import run_paths as names
from hybridrl.run_files.run_status import read_run_status
from hybridrl.system.storage import to_json

_MAX_CORE_SHARE = 0.05
"""Of the time, which making one part takes at most."""
_FILES_OF_PART = {
    "head": (names.METRICS, names.STATUS, names.SUMMARY, names.SETTINGS),
    "words": (names.METRICS, names.STEPS, names.STATUS, names.EVALUATIONS),
    "curves": (names.METRICS, names.EVALUATIONS),
    "timeline": (names.STEPS,),
    "samples": (names.SAMPLES, names.TOKENS, names.SETTINGS),
    "data": (names.DATA_REPORT,),
    "settings": (names.SETTINGS,),
    "state": (
        *(names.METRICS, names.STATUS, names.EVALUATIONS, names.RECOVERIES),
        *(names.LOGS, f"{names.LOGS}/*", names.CHECKPOINTS_FOLDER, names.BAD_STEPS),
    ),
}
"""The files and folders of a run that each part is made of."""


class CachedPart:
    """A part of a report that is built from files and cached for all clients.

    Args:
        make: Makes it.
        stamp: What changes when the files do.
    """

    def __init__(self, make: Callable[[], Any], stamp: Callable[[], Any]) -> None:
        self._make, self._stamp = make, stamp
        self._lock = threading.Lock()
        self._made, self._text, self._due = "", "", 0.0

    def version(self) -> str:
        """Return a value that changes whenever `text` would return something else."""
        stamp = _hash_stamps(self._stamp())
        return stamp if self._is_due(stamp) else self._made

    def text(self) -> str:
        """Return the part as JSON, rebuilt if its files changed."""
        with self._lock:
            # Before it is read: what changes meanwhile counts later.
            stamp = _hash_stamps(self._stamp())
            if self._is_due(stamp):
                began = time.monotonic()
                self._text = to_json(self._make())
                ended = time.monotonic()
                self._made, self._due = stamp, ended + (ended - began) / _MAX_CORE_SHARE
            return self._text

    def _is_due(self, stamp: str) -> bool:
        return not self._made or (stamp != self._made and time.monotonic() >= self._due)


class LiveReport:
    """A run's report as cached parts.

    Args:
        content: What makes them.
    """

    def __init__(self, content: ReportContent) -> None:
        self.name = content.run.name
        folders = [content.run.path, *(one.path for one in content.against)]
        self.parts = {
            name: CachedPart(make, partial(read_file_stamps, folders, _FILES_OF_PART[name]))
            for name, make in content.parts.items()
        }


def read_file_stamps(folders: Iterable[Path], files: Iterable[str]) -> list[Any]:
    """Return the modification time and size of each file, and the run's state, which changes
    without a file when a job is killed."""
    stamps: list[Any] = []
    for folder in folders:
        for name in files:
            for file in sorted(folder.glob(name)) if "*" in name else [folder / name]:
                try:
                    found = file.stat()
                except OSError:
                    continue
                stamps.append((name, found.st_mtime_ns, found.st_size))
            if name == names.STATUS:
                stamps.append(read_run_status(folder))
    return stamps


def _hash_stamps(stamp: Any) -> str:
    return f"{zlib.crc32(repr(stamp).encode()):08x}"
