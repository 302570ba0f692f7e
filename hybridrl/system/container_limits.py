"""The cores and the memory that this process may use: what its machine has, limited by its affinity
and by the control group of its container.

A container sees its own group as the uppermost one, of version 2 or of version 1. Other groups, as
batch systems make them without a container, are not looked at.
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
    ("memory.max", "memory.current", "memory.stat", ""),
    (
        *("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
        "total_",
    ),
)
"""The limit, what is used, a table of what it is used for, and the prefix of those of its rows that
count groups within this one, too."""
_DROPPABLE_ROWS = ("active_file", "inactive_file")
"""Cached pages of files, which the kernel drops when memory runs out."""
_HIERARCHY_ROW = "hierarchical_memory_limit"
"""In version 1, the least limit of this group and those above it."""
_UNLIMITED = 2**60
"""Version 1 writes a number above this where there is no limit."""


class ContainerMemory(NamedTuple):
    """Bytes that all processes of the container may use together, and those that they use now,
    without cached pages of files."""

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
            time, period = map(int, " ".join(map(_read, names)).split())
        except ValueError:  # not of this version, or `max`
            continue
        return time / period if time > 0 and period > 0 else None
    return None


def read_container_memory() -> ContainerMemory | None:
    """Return the memory of the container; None if it has no limit."""
    for limit_name, used_name, table_name, prefix in _MEMORY_FILES:
        rows = _read_numbers(table_name)
        limit = min(_number(_read(limit_name), _UNLIMITED), rows.get(_HIERARCHY_ROW, _UNLIMITED))
        if limit < _UNLIMITED:
            cached = sum(rows.get(prefix + name, 0) for name in _DROPPABLE_ROWS)
            return ContainerMemory(limit, max(0, _number(_read(used_name), 0) - cached))
    return None


def _read_numbers(name: str) -> dict[str, int]:
    lines = (line.partition(" ") for line in _read(name).splitlines())
    return {row: int(value) for row, _, value in lines if value.isdecimal()}


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.strip().isdecimal() else otherwise


def _read(name: str) -> str:
    """Return a file's text; empty if there is none."""
    try:
        return (CGROUP_FOLDER / name).read_text(encoding="ascii")
    except (OSError, UnicodeError):
        return ""
