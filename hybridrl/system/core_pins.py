"""What the phases of this process, and the pools of child processes beside them, take of the cores,
and the cores that pools are kept to meanwhile (`resources=auto`).

All other cores are for the workers alone, which are not pinned. Pins last as long as the phase:
what works alone may use all cores.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from hybridrl.system.container_limits import read_core_quota

WORKERS, WALL, QUEUED = "workers", "wall", "queued"
"""In the load of a phase: the CPU seconds of this process, the seconds of the phase, and for how
long of them one of its threads waited for a core. All other entries are CPU seconds of pools."""
PoolCores = Mapping[str, frozenset[int]]
"""The cores of pools, by name."""


class CorePins:
    """The loads of the phases of this process, and the pins of its pools.

    Attributes:
        pools: The names of the pools that child processes are of, by the child's number.
    """

    def __init__(self) -> None:
        self.pools: dict[int, str] = {}
        self._of_phases: Mapping[str, PoolCores] | None = None
        self._now: PoolCores = {}
        self._usable = frozenset(os.sched_getaffinity(0))
        self._lock = threading.RLock()

    def assign(self, of_phases: Mapping[str, PoolCores] | None) -> frozenset[int]:
        """Keep pools to these cores in later phases, and measure all phases; None: do neither.

        Returns:
            The cores that this process may use; none if a quota gives its container less time than
            these have.
        """
        self._of_phases, self._now = of_phases, {}
        self._usable = frozenset(os.sched_getaffinity(0))
        has_quota = (read_core_quota() or math.inf) < len(self._usable)
        return frozenset() if has_quota else self._usable

    @contextmanager
    def phase(self, name: str, loads: dict[str, dict[str, float]]) -> Iterator[None]:
        """Pin the pools in a phase, and add what it takes to its load."""
        if self._of_phases is None or self._now:
            yield
            return
        before, waited, begin = self._read_seconds(), _read_queues(), time.perf_counter()
        pins = self._of_phases.get(name, {})
        try:
            self._move({}, pins)
            yield
        finally:
            self._move(pins, {})
            wall = time.perf_counter() - begin
            queued = [seconds - waited.get(one, 0.0) for one, seconds in _read_queues().items()]
            load = {WALL: wall, QUEUED: min(wall, max(queued, default=0.0))}
            for stage, seconds in self._read_seconds().items():  # of a lost process it is unknown
                load[stage] = max(0.0, seconds - before[stage])
            add_load(loads.setdefault(name, {}), load)

    def add_child(self, pool: str, pid: int) -> None:
        """Count a child process that has just started, and all that it will start, to a pool."""
        with self._lock:
            self.pools[pid] = pool
            self._move({}, self._now)

    def _move(self, before: PoolCores, after: PoolCores) -> None:
        """Keep pools to other cores, but threads that have an affinity of their own."""
        with self._lock:
            self._now = after
            # Twice, because they may start others meanwhile, which inherit their affinity.
            passes = range(2 if before or after else 0)
            for pool, pid in (one for _ in passes for one in self._list_processes()):
                old, new = (cores.get(pool, self._usable) for cores in (before, after))
                for thread in _list_threads(pid):
                    with contextlib.suppress(OSError):
                        if os.sched_getaffinity(thread) == old:
                            os.sched_setaffinity(thread, new)

    def _list_processes(self) -> list[tuple[str, int]]:
        """List the processes of pools and their descendants."""
        found = [(pool, pid) for pid, pool in self.pools.copy().items()]
        for pool, pid in found:  # which grows
            for thread in _list_threads(pid):
                with contextlib.suppress(OSError):
                    children = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
                    found += [(pool, int(child)) for child in children]
        return found

    def _read_seconds(self) -> dict[str, float]:
        """Return the CPU seconds of each stage so far, with those of processes that have ended."""
        found: dict[str, float] = defaultdict(float, {WORKERS: time.process_time()})
        for pool, pid in self._list_processes():
            with contextlib.suppress(psutil.Error):
                found[pool] += sum(psutil.Process(pid).cpu_times()[:4])
        return found


PINS = CorePins()
"""Of this process."""


def add_load(total: dict[str, float], load: Mapping[str, float], share: float = 1.0) -> None:
    """Add a share of a load to others."""
    for name, seconds in load.items():
        total[name] = total.get(name, 0.0) + share * seconds


def _list_threads(pid: int) -> list[int]:
    with contextlib.suppress(OSError):  # it has just ended
        return [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
    return []


def _read_queues() -> dict[int, float]:
    """Return the seconds that each thread of this process has waited for a core so far."""
    found = {}
    for thread in _list_threads(os.getpid()):
        with contextlib.suppress(OSError):
            queued = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]
            found[thread] = int(queued) / 1e9
    return found
