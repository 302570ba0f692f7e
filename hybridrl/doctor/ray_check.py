"""Check of Ray processes and session folders that exist before a job starts."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from hybridrl.doctor.finding import DoctorFinding, report_note, report_ok
from hybridrl.system.formatting import format_bytes, format_seconds

_RAYLET = "raylet"
"""The one process that each node of Ray has."""
_SESSION_FOLDER = Path(tempfile.gettempdir()) / "ray"
_LARGE_SESSION_BYTES = 2**30


def check() -> Iterator[DoctorFinding]:
    """Yield findings on running Ray nodes, on `RAY_ADDRESS`, and on the size of old sessions."""
    nodes = []
    for process in psutil.process_iter(["name", "username", "create_time"]):
        if process.info["name"] == _RAYLET:
            age = format_seconds(time.time() - process.info["create_time"])
            nodes.append(f"process {process.pid} of {process.info['username']} ({age})")
    if nodes:
        yield report_note(
            "ray",
            f"runs here already: {', '.join(nodes)}",
            "It takes cores and memory from new jobs. If nobody uses it: ray stop.",
        )
    else:
        yield report_ok("ray", "none runs here, so jobs start their own")
    if address := os.environ.get("RAY_ADDRESS"):
        yield report_note(
            "ray", f"RAY_ADDRESS={address}: jobs join it", "unset RAY_ADDRESS otherwise."
        )
    left = _measure_session_bytes()
    if left > _LARGE_SESSION_BYTES:
        yield report_note(
            "ray",
            f"{_SESSION_FOLDER} holds {format_bytes(left)} of logs and spilled objects",
            f"If no Ray runs here: rm -r {_SESSION_FOLDER}/session_*",
        )


def _measure_session_bytes() -> int:
    """Measure the bytes of Ray's session folders, for at most one second."""
    ends, total = time.monotonic() + 1.0, 0
    for folder, _, files in os.walk(_SESSION_FOLDER):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118
            except OSError:  # gone meanwhile
                continue
        if time.monotonic() > ends:
            break
    return total
