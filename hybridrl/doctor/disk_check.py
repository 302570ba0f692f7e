"""Check of the disk that holds the run folders."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hybridrl.doctor.finding import DoctorFinding, report_note, report_ok, report_problem
from hybridrl.system.formatting import format_bytes

_MIN_FREE_BYTES, _LOW_FREE_BYTES = 256 * 2**20, 10 * 2**30
"""Bytes: for a run of the tiny model, and for some checkpoints of a small one."""
_SLOW_BYTES_PER_SECOND = 50 * 2**20
"""Bytes a second: a checkpoint of a model of 1 billion parameters (15 GiB) takes five minutes."""
_BLOCK_BYTES, _MAX_BLOCKS, _MAX_WRITE_S = 4 * 2**20, 16, 2.0
"""Of the timed write: at most so many pieces, and so long."""
_OTHER_DISK_ADVICE = "Set run.root to a folder on another disk."


def check(runs: Path) -> Iterator[DoctorFinding]:
    """Yield a finding on free space and on the speed of a small synchronous write."""
    folder = next(one for one in (runs.absolute(), *runs.absolute().parents) if one.is_dir())
    topic = f"disk of {runs}"
    if not os.access(folder, os.W_OK | os.X_OK):
        yield report_problem(topic, f"this user may not write to {folder}", _OTHER_DISK_ADVICE)
        return
    usage = shutil.disk_usage(folder)
    space = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free"
    if usage.free < _MIN_FREE_BYTES:
        yield report_problem(topic, space, f"Free some space, or: {_OTHER_DISK_ADVICE}")
        return
    try:
        speed = _measure_write_speed(folder)
    except OSError as error:
        yield report_problem(
            topic, f"{space}, and writing fails: {error.strerror}", _OTHER_DISK_ADVICE
        )
        return
    what = f"{space}; {format_bytes(speed)}/s written"
    if usage.free < _LOW_FREE_BYTES:
        yield report_note(topic, what, "Checkpoints of a model take 16 bytes for each parameter.")
    elif speed < _SLOW_BYTES_PER_SECOND:
        yield report_note(topic, what, f"Checkpoints will take long. {_OTHER_DISK_ADVICE}")
    else:
        yield report_ok(topic, what)


def _measure_write_speed(folder: Path) -> float:
    """Measure the bytes a second of a synchronous write to a temporary file.

    Raises:
        OSError: if it cannot be written.
    """
    piece, written = os.urandom(_BLOCK_BYTES), 0  # some disks do not write zeros
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.perf_counter()
        for _ in range(_MAX_BLOCKS):
            written += file.write(piece)
            os.fsync(file.fileno())
            if time.perf_counter() - began > _MAX_WRITE_S:
                break
        return written / (time.perf_counter() - began)
