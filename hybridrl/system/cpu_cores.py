"""The cores that this process may use: those it is bound to, within the quota of its container."""

from __future__ import annotations

import math
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Their number, a begun one of a quota with the whole; the machine may have many more."""
    bound = len(os.sched_getaffinity(0))
    quota = core_quota()
    return bound if quota is None else min(bound, max(1, math.ceil(quota)))


def core_quota() -> float | None:
    """Cores' worth of time that the container may take; None: no limit."""
    try:
        time, period = QUOTA.read_text(encoding="ascii").split()
        return None if time == "max" else int(time) / int(period)
    except (OSError, ValueError):
        return None
