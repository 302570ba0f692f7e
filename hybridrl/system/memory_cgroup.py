"""A cgroup that limits all memory of one program, its files and buffers included.

It lies in the control group of this process, wherever the machine lets this process make one that
counts memory: of version 1 usually as root. Of version 2 the kernel wants a group that holds groups
to hold no processes, so there it may also lie beside this process's own, if that one has no limit
that would be escaped so. Elsewhere, in most containers, there is none, and whoever runs the program
has to bound it otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

_PREFIX = "hybridrl-program-"
_LIMITS = {  # what is written where, by version: the limit, and the same of what is swapped out
    1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    2: ("memory.max", "memory.swap.max"),
}
_ROOT = Path("/sys/fs/cgroup")
_ENTER = "import os, sys; os.write(int(sys.argv[1]), b'0')"
_numbers = count()
_ENDING_S = 2
"""What a killed process may need to give back its memory."""


class MemoryCgroup:
    """A memory cgroup for one program. Close it when the program has ended.

    Attributes:
        entrance: a descriptor; a process that writes `0` to it is moved into the group.
    """

    def __init__(self, parent: Path, limit: int) -> None:
        version = 2 if (parent / "cgroup.controllers").exists() else 1
        self._folder = parent / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self._folder.mkdir()
        try:
            largest, swapped = _LIMITS[version]
            (self._folder / largest).write_text(str(limit))
            with contextlib.suppress(OSError):  # a machine without swap has no such file
                (self._folder / swapped).write_text(str(limit if version == 1 else 0))
            self.entrance = os.open(self._folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except BaseException:
            self._folder.rmdir()
            raise
        self._events = "memory.events" if version == 2 else "memory.oom_control"

    def kills(self) -> int:
        """Return how many processes the kernel killed because the cgroup was out of memory."""
        lines = (self._folder / self._events).read_text().splitlines()
        return sum(int(n) for name, n in map(str.split, lines) if name == "oom_kill")

    def close(self) -> None:
        """Remove the cgroup; processes in it may still be exiting."""
        os.close(self.entrance)
        for _ in range(_ENDING_S * 100):
            try:
                self._folder.rmdir()
                return
            except OSError:
                time.sleep(0.01)


def make_memory_cgroup(limit: int) -> MemoryCgroup | None:
    """Make a cgroup with a memory limit in bytes; None where this process may not make one."""
    parent = _find_parent_cgroup()
    if parent is None:
        return None
    try:
        return MemoryCgroup(parent, limit)
    except OSError:
        return None


@functools.cache
def _find_parent_cgroup() -> Path | None:
    """Return the cgroup under which new ones can be made, found by making one and moving a process
    into it; None if there is none."""
    for folder in _candidates():
        try:
            group = MemoryCgroup(folder, 1 << 30)
        except OSError:
            continue
        try:
            enter = [sys.executable, "-ISc", _ENTER, str(group.entrance)]
            tried = subprocess.run(enter, pass_fds=[group.entrance], capture_output=True)
            if tried.returncode == 0:
                _remove_leftovers(folder)
                return folder
        finally:
            group.close()
    return None


def _candidates() -> list[Path]:
    """Return cgroups that account for the memory of their children, this process's own first."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "memory":
                found.append(_ROOT / "memory" / path.lstrip("/"))
            elif controllers == "":
                found += _list_v2_candidates(path)
    return found


def _list_v2_candidates(path: str) -> list[Path]:
    own = _ROOT / path.lstrip("/")
    limit = own / "memory.max"  # the uppermost has none
    is_free = limit.exists() and limit.read_text().strip() == "max"
    return [group for group in (own, *([own.parent] if is_free else [])) if _counts_memory(group)]


def _counts_memory(folder: Path) -> bool:
    control = folder / "cgroup.subtree_control"
    return control.exists() and "memory" in control.read_text().split()


def _remove_leftovers(parent: Path) -> None:
    """Remove cgroups of processes that were killed before they could remove them."""
    for folder in parent.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):  # a program's end takes a moment
                folder.rmdir()
