"""The shared-memory segments of vLLM: each job's carry its name and are removed soon after the job
ends.

Beside them lies a file that every process of the job holds a lock on. The kernel lets go of it when
they have ended, however that was. So others know whether a segment is in use, also where they do
not see the job's processes: in another container, or on a node that is not the driver's.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hybridrl.system.locations import is_still_at

SHARED_MEMORY_FOLDER = Path("/dev/shm")
_JOB_NAME_PATTERN = re.compile(r"hybridrl-\d+-\d+")
_OPENED = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
"""How locks are opened: everybody may put a link to a file of ours among them."""
_held: list[int] = []


def lock_shared_memory(job: str) -> None:
    """Lock the segments of a job against removal by others for the lifetime of this process."""
    while True:
        held = os.open(_lock(job), _OPENED, 0o600)
        fcntl.flock(held, fcntl.LOCK_SH)
        if is_still_at(held, _lock(job)):  # otherwise it has just been removed
            _held.append(held)
            return
        os.close(held)


def remove_shared_memory(job: str) -> None:
    """Remove the shared-memory segments of a job."""
    for path in SHARED_MEMORY_FOLDER.glob(f"*{job}*"):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logging.getLogger(__name__).warning("could not remove %s: %s", path, error)


def remove_stale_segments() -> None:
    """Remove the segments of jobs whose processes have all ended."""
    for job in _ended_jobs():
        remove_shared_memory(job)


def list_stale_segments() -> dict[str, int]:
    """Return the bytes of segments left by jobs whose processes have all ended, by job."""
    return {
        job: sum(path.stat().st_size for path in SHARED_MEMORY_FOLDER.glob(f"*{job}*"))
        for job in _ended_jobs()
    }


def _ended_jobs() -> Iterator[str]:
    """Yield the names of ended jobs that left segments; while one is yielded, no process can lock
    it."""
    found = (
        _JOB_NAME_PATTERN.search(path.name) for path in SHARED_MEMORY_FOLDER.glob("*hybridrl-*")
    )
    for job in {name.group() for name in found if name}:
        try:
            lock = os.open(_lock(job), _OPENED, 0o600)
        except OSError:  # it is another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield job
        except BlockingIOError:  # it is in use
            pass
        finally:
            os.close(lock)


def _lock(job: str) -> Path:
    return SHARED_MEMORY_FOLDER / f"{job}.lock"
