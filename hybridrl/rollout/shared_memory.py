"""vLLM's shared-memory segments: each job's have its name, and none outlives it for long."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")
NAME = re.compile(r"hybridrl-(\d+)-\d+")


def remove_shared_memory(job: str) -> None:
    """Removes what the job called `job` left in shared memory."""
    for path in FOLDER.glob(f"*{job}*"):
        _remove(path)


def remove_leftovers() -> None:
    """Removes what jobs left whose driver process is gone, killed perhaps."""
    for path in FOLDER.glob("*hybridrl-*"):
        found = NAME.search(path.name)
        if found and not psutil.pid_exists(int(found.group(1))):
            _remove(path)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logging.getLogger(__name__).warning("could not remove %s: %s", path, error)
