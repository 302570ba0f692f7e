"""Check of Ray processes and session folders that exist before a job starts."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from hybridrl.doctor.finding import Finding, note, ok
from hybridrl.system.formatting import readable_bytes, readable_seconds

RAYLET = "raylet"
"""The one process that each node of Ray has."""
SESSIONS = Path(tempfile.gettempdir()) / "ray"
MANY_BYTES = 2**30


def check() -> Iterator[Finding]:
    """Yield findings on running Ray nodes, on `RAY_ADDRESS`, and on the size of old sessions."""
    nodes = []
    for process in psutil.process_iter(["name", "username", "create_time"]):
        if process.info["name"] == RAYLET:
            age = readable_seconds(time.time() - process.info["create_time"])
            nodes.append(f"process {process.pid} of {process.info['username']} ({age})")
    if nodes:
        yield note(
            "ray",
            f"runs here already: {', '.join(nodes)}",
            "It takes cores and memory from new jobs. If nobody uses it: ray stop.",
        )
    else:
        yield ok("ray", "none runs here, so jobs start their own")
    if address := os.environ.get("RAY_ADDRESS"):
        yield note("ray", f"RAY_ADDRESS={address}: jobs join it", "unset RAY_ADDRESS otherwise.")
    left = _sessions()
    if left > MANY_BYTES:
        yield note(
            "ray",
            f"{SESSIONS} holds {readable_bytes(left)} of logs and spilled objects",
            f"If no Ray runs here: rm -r {SESSIONS}/session_*",
        )


def _sessions() -> int:
    """Measure the bytes of Ray's session folders, for at most one second."""
    ends, total = time.monotonic() + 1.0, 0
    for folder, _, files in os.walk(SESSIONS):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118
            except OSError:  # gone meanwhile
                continue
        if time.monotonic() > ends:
            break
    return total
