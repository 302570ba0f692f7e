"""A lease on a run's folder: one job at a time, and a dead job loses it.

`<run>/lock.json` says which process has the folder. On that process's own machine others ask
whether it still lives; elsewhere, whether it has touched the file lately. The clock is the file
system's, so machines need not agree on the time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from hybridrl.errors import ConfigError
from hybridrl.run_files.run_paths import LOCK_FILE
from hybridrl.system.bounded_files import open_regular, parse_json
from hybridrl.system.locations import is_still_at
from hybridrl.system.storage import explain_write_errors

_HEARTBEAT_SECONDS = 10.0
"""How often a job touches its lock."""
LEASE_SECONDS = 60.0
"""A lock that another machine has not touched for so long is nobody's."""
_POLL_SECONDS = 1.0
"""How often a job that waits looks whether the lock has been touched."""
_CLOCK_TOLERANCE_SECONDS = 2.0
"""By which the start of a process may seem to differ when its machine's clock has been set."""


class RunLock:
    """A lock that keeps the folder of a run for this process; use it in a `with`.

    Args:
        folder: It exists.
        setting: What names it.
    """

    def __init__(self, folder: Path, setting: str = "run.directory") -> None:
        self.file, self._setting = folder / LOCK_FILE, setting
        self._mine = describe_this_process()
        self._stop = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="run lock", daemon=True)

    def __enter__(self) -> RunLock:
        """Acquire the folder. A holder on another machine gets time to show that it is alive.

        Raises:
            ConfigError: if another job has it; names the process and its machine.
            StorageError: if that cannot be noted.
        """
        with explain_write_errors(self.file):
            seen: float | None = None
            while not self._taken(seen):
                seen = seen or self.file.stat().st_mtime
                time.sleep(_POLL_SECONDS)
        self._beating.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the folder, unless another job has acquired it since."""
        self._stop.set()
        with contextlib.suppress(OSError), _open_exclusively(self.file) as file:
            if _read_holder(file) == self._mine:
                self.file.unlink()

    def _taken(self, seen: float | None) -> bool:
        """Acquire the folder if it is free; return False if the holder may still be alive.

        Args:
            seen: When the holder had touched the file as this job came; None: it comes now.
        """
        with _open_exclusively(self.file) as file:
            holder, beat = _read_holder(file), os.fstat(file).st_mtime
            if holder is None or is_process_dead(
                holder, _read_file_system_time(self.file.parent) - beat
            ):
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(self._mine).encode(), 0)
                os.fsync(file)
                return True
        if holder["machine"] != self._mine["machine"] and seen in (None, beat):
            return False
        since = datetime.fromtimestamp(holder["since"]).isoformat(" ", "seconds")
        raise ConfigError(
            f"{self.file.parent} is in use: process {holder['pid']} on {holder['host']} has been "
            f"writing there since {since}. Wait for it, end it, or give another {self._setting}. "
            "To begin a run of your own from its checkpoints, write fork= in place of resume=."
        )

    def _beat(self) -> None:
        while not self._stop.wait(_HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self.file)


def describe_this_process() -> dict[str, Any]:
    """Return what other processes need to find out whether this one is alive."""
    process = psutil.Process()
    return {
        "host": socket.gethostname(),
        "machine": _identify_machine(),
        "pid": process.pid,
        "started": process.create_time(),
        "since": time.time(),
    }


def read_lock_holder(file: Path) -> dict[str, Any] | None:
    """Return the process noted in a lock file; None if there is none."""
    try:
        with open_regular(file) as opened:
            return _read_holder(opened.fileno())
    except OSError:
        return None


def _identify_machine() -> str:
    """Return an identity shared by processes that see each other's process ids: same boot, same
    container."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


def is_process_dead(holder: dict[str, Any], silent: float) -> bool:
    """Return whether the noted process is gone.

    Args:
        silent: Seconds since it touched the file.
    """
    if holder["machine"] != _identify_machine():
        return silent >= LEASE_SECONDS
    try:
        started: float = psutil.Process(holder["pid"]).create_time()
    except psutil.NoSuchProcess:
        return True
    return abs(started - float(holder["started"])) >= _CLOCK_TOLERANCE_SECONDS


def _read_file_system_time(folder: Path) -> float:
    """Return the time by the clock of the folder's file system."""
    probe = folder / f".{LOCK_FILE}.{os.getpid()}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


@contextlib.contextmanager
def _open_exclusively(path: Path) -> Iterator[int]:
    """Open the file with an exclusive lock for the block, where the file system supports locks."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            # Otherwise its holder has removed it while this one waited.
            if is_still_at(file, path):
                yield file
                return
        finally:
            os.close(file)


def _read_holder(file: int) -> dict[str, Any] | None:
    """Return the noted holder; None if there is no complete note."""
    try:
        found = parse_json(os.pread(file, 1 << 16, 0))
        return found if {"host", "machine", "pid", "started", "since"} <= found.keys() else None
    except (ValueError, AttributeError):
        return None
