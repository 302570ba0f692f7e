"""Check of the disk that holds the run folders."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hybridrl.doctor.finding import Finding, note, ok, problem
from hybridrl.system.formatting import readable_bytes

LEAST_FREE, LITTLE_FREE = 256 * 2**20, 10 * 2**30
"""Bytes: for a run of the tiny model, and for some checkpoints of a small one."""
SLOW = 50 * 2**20
"""Bytes a second: a checkpoint of a model of 1 billion parameters (15 GiB) takes five minutes."""
PIECE, PIECES, LONGEST_S = 4 * 2**20, 16, 2.0
"""Of the timed write: at most so many pieces, and so long."""
CURE = "Set run.root to a folder on another disk."


def check(runs: Path) -> Iterator[Finding]:
    """Yield a finding on free space and on the speed of a small synchronous write."""
    folder = next(one for one in (runs.absolute(), *runs.absolute().parents) if one.is_dir())
    topic = f"disk of {runs}"
    if not os.access(folder, os.W_OK | os.X_OK):
        yield problem(topic, f"this user may not write to {folder}", CURE)
        return
    usage = shutil.disk_usage(folder)
    space = f"{readable_bytes(usage.free)} of {readable_bytes(usage.total)} free"
    if usage.free < LEAST_FREE:
        yield problem(topic, space, f"Free some space, or: {CURE}")
        return
    try:
        speed = write_speed(folder)
    except OSError as error:
        yield problem(topic, f"{space}, and writing fails: {error.strerror}", CURE)
        return
    what = f"{space}; {readable_bytes(speed)}/s written"
    if usage.free < LITTLE_FREE:
        yield note(topic, what, "Checkpoints of a model take 16 bytes for each parameter.")
    elif speed < SLOW:
        yield note(topic, what, f"Checkpoints will take long. {CURE}")
    else:
        yield ok(topic, what)


def write_speed(folder: Path) -> float:
    """Measure the bytes a second of a synchronous write to a temporary file.

    Raises:
        OSError: if it cannot be written.
    """
    piece, written = os.urandom(PIECE), 0  # some disks do not write zeros
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.perf_counter()
        for _ in range(PIECES):
            written += file.write(piece)
            os.fsync(file.fileno())
            if time.perf_counter() - began > LONGEST_S:
                break
        return written / (time.perf_counter() - began)
