"""The cores and the memory that this process may use: what its machine has, limited by its affinity
and by the control group of its container.

A container sees its own group as the uppermost one, of version 2 or of version 1.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

CGROUP_FOLDER = Path("/sys/fs/cgroup")
_QUOTA_FILES = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""By version of control groups, the newer first."""
_MEMORY_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        *("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
        "total_inactive_file",
    ),
)
"""The limit, what is used, a table of what it is used for, and the row of it that counts cached
pages of files, which the kernel drops when memory runs out."""
_UNLIMITED = 2**60
"""Version 1 writes a number above this where there is no limit."""


class ContainerMemory(NamedTuple):
    """Bytes that all processes of the container may use together, and those that they use now,
    without pages of files that can be dropped."""

    limit: int
    used: int


def count_usable_cores() -> int:
    """Return the number of cores that this process may use; a fractional quota is rounded up. The
    machine may have more."""
    bound = len(os.sched_getaffinity(0))
    quota = read_core_quota()
    return bound if quota is None else min(bound, max(1, math.ceil(quota)))


def read_core_quota() -> float | None:
    """Return the container's CPU quota in cores; None if it has no limit."""
    for names in _QUOTA_FILES:
        try:
            time, period = " ".join(map(_read, names)).split()
            return None if time in ("max", "-1") else int(time) / int(period)
        except (OSError, ValueError):  # not of this version
            continue
    return None


def read_container_memory() -> ContainerMemory | None:
    """Return the memory of the container; None if it has no limit."""
    for limit_name, used_name, table_name, dropped in _MEMORY_FILES:
        try:
            limit, used = int(_read(limit_name)), int(_read(used_name))
            rows = dict(line.split() for line in _read(table_name).splitlines())
        except (OSError, ValueError):  # not of this version, or `max`
            continue
        if limit < _UNLIMITED:
            return ContainerMemory(limit, used - int(rows.get(dropped, 0)))
    return None


def _read(name: str) -> str:
    return (CGROUP_FOLDER / name).read_text(encoding="ascii")
