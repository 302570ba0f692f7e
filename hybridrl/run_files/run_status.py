"""The status of a run in `<run>/status.json`: running, finished, failed, interrupted, killed.

    {"state": "failed", "why": "actor rank 1 died during ...", "began": "...", "ended": "..."}

A job that is killed cannot write that it was. Its file goes on saying `running`, and its lock is
nobody's: `read_run_status` sees both.
"""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hybridrl.errors import HybridRLError
from hybridrl.run_files.run_lock import LEASE_SECONDS, is_process_dead, read_lock_holder
from hybridrl.run_files.run_paths import LOCK_FILE, STATUS
from hybridrl.system.bounded_files import load_object
from hybridrl.system.storage import replace_file, to_json

RUNNING, FINISHED, FAILED, INTERRUPTED, KILLED = (
    *("running", "finished", "failed", "interrupted", "killed"),
)


class RunStatus:
    """The status of the job that holds the run's folder.

    Args:
        folder: Of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / STATUS
        # A run that goes on began when it first did.
        self._began = load_status(folder)["began"] or _format_now()
        self._state = ""

    def begin(self) -> None:
        """Record that the run is running, whatever an earlier job has recorded.

        Raises:
            StorageError: if that cannot be noted.
        """
        if not self._state:
            self._write(RUNNING)

    def end(self, error: BaseException | None) -> bool:
        """Note how the job has ended, as far as the disk takes it. Only the first end counts, and
        one that had not begun leaves what an earlier job has noted.

        Args:
            error: What ended it; None: it has done all of its work.

        Returns:
            Whether this end counts.
        """
        if self._state != RUNNING:
            return False
        with contextlib.suppress(HybridRLError):
            self._write(*classify_outcome(error))
        return True

    def _write(self, state: str, why: str = "") -> None:
        self._state = state
        ended = None if state == RUNNING else _format_now()
        content = {"state": state, "why": why, "began": self._began, "ended": ended}
        with replace_file(self._file) as part:
            part.write_text(to_json(content, indent=1) + "\n", encoding="utf-8")


def classify_outcome(error: BaseException | None) -> tuple[str, str]:
    """Return the status that an exception, or None for success, gives a run, and the reason."""
    match error:
        case None:
            return FINISHED, ""
        case KeyboardInterrupt() | SystemExit():
            return INTERRUPTED, str(error) or "Ctrl-C"
    why = str(error).partition("\n")[0]
    return FAILED, why if isinstance(error, HybridRLError) else f"{type(error).__name__}: {why}"


def read_run_status(folder: Path) -> tuple[str, str]:
    """Return the state of a run and why; see `load_status`."""
    found = load_status(folder)
    return found["state"], found["why"]


def load_status(folder: Path) -> dict[str, Any]:
    """Return `state`, `why`, `began` and `ended` of a run. The state is `running`, `finished`,
    `failed`, `interrupted` or `killed`; all are empty where no job has noted them."""
    try:
        found = load_object(folder / STATUS)
        state, why = str(found.get("state", "")), str(found.get("why", ""))
    except (OSError, ValueError):
        return dict.fromkeys(("state", "why", "began", "ended"), "")
    if state == RUNNING and (fault := _who_is_gone(folder / LOCK_FILE)):
        state, why = KILLED, fault
    return {"state": state, "why": why, "began": found.get("began"), "ended": found.get("ended")}


def _who_is_gone(lock: Path) -> str:
    """Say which job has ended without noting it; empty if it still has its lock."""
    holder = read_lock_holder(lock)
    if holder is None:
        return "The job ended without a word."
    try:
        silent = time.time() - lock.stat().st_mtime
    except OSError:
        silent = LEASE_SECONDS
    is_gone = is_process_dead(holder, silent)
    return f"Process {holder['pid']} on {holder['host']} is gone." if is_gone else ""


def _format_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
