"""The CPU cores that this process may use: its affinity, limited by the quota of its container."""

from __future__ import annotations

import math
import os
from pathlib import Path

CPU_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


def count_usable_cores() -> int:
    """Return the number of cores that this process may use; a fractional quota is rounded up. The
    machine may have more."""
    bound = len(os.sched_getaffinity(0))
    quota = read_core_quota()
    return bound if quota is None else min(bound, max(1, math.ceil(quota)))


def read_core_quota() -> float | None:
    """Return the container's CPU quota in cores; None if it has no limit."""
    try:
        time, period = CPU_QUOTA_FILE.read_text(encoding="ascii").split()
        return None if time == "max" else int(time) / int(period)
    except (OSError, ValueError):
        return None
