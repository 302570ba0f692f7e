"""What the phases of this process, and the pools of child processes beside them, take of the cores,
and the cores that they are kept to (`resources=auto`).

Pins last as long as the phase: what works alone may use all cores. Threads and processes that begin
meanwhile inherit the pins of those that start them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import psutil

WORKERS, WALL, QUEUED = "workers", "wall", "queued"
"""In the load of a phase: the CPU seconds of this process, the seconds of the phase, and those of
them that its thread waited for a core. All other entries are CPU seconds of pools."""
StageCores = Mapping[str, Collection[int]]
"""The cores of `WORKERS` and of pools, by name."""
_SCHEDULED = Path("/proc/thread-self/schedstat")


class HostCores(NamedTuple):
    """The cores that a process may use, and the number of threads that it computes with."""

    usable: frozenset[int]
    threads: int


class CorePins:
    """The loads of the phases of this process, and its pins.

    Attributes:
        pools: The pools of this process; they add themselves.
    """

    def __init__(self) -> None:
        self.pools: WeakSet[Any] = WeakSet()
        self._of_phases: Mapping[str, StageCores] | None = None
        self._now: StageCores = {}
        self._usable = os.sched_getaffinity(0)

    def assign(self, of_phases: Mapping[str, StageCores] | None) -> HostCores:
        """Keep later phases to these cores, and measure all phases; None: do neither."""
        import torch  # which takes a second, and pools are used without it

        if self._of_phases is None:
            self._usable = os.sched_getaffinity(0)
        self._of_phases = of_phases
        return HostCores(frozenset(self._usable), torch.get_num_threads())

    @contextmanager
    def phase(self, name: str, load: dict[str, float]) -> Iterator[None]:
        """Pin a phase, and add what it takes to `load`."""
        if self._of_phases is None or self._now:
            yield
            return
        before, begin = self._read(), time.perf_counter()
        self._now = self._of_phases.get(name, {})
        threads = {stage: list(_threads(self._pids(stage))) for stage in self._now}
        # Of all before any is pinned: what they start meanwhile inherits the pins.
        own = {one: found for some in threads.values() for one, found in _affinities(some)}
        try:
            for stage, some in threads.items():
                _keep_to(some, self._now[stage])
            yield
        finally:
            load[WALL] = load.get(WALL, 0.0) + time.perf_counter() - begin
            stages, self._now = self._now, {}
            for stage in stages:
                for thread in _threads(self._pids(stage)):
                    _keep_to([thread], own.get(thread, self._usable))
            for stage, taken in self._read().items():  # of a lost process nothing is known
                load[stage] = load.get(stage, 0.0) + max(0.0, taken - before.get(stage, 0.0))

    def pin_child(self, pool: str, pid: int) -> None:
        """Keep a process that joins a pool in the middle of a phase to the cores of the pool."""
        if pool in (now := self._now):
            _keep_to(_threads([pid]), now[pool])

    def _pids(self, stage: str) -> list[int]:
        if stage == WORKERS:  # with what it has started beside the pools
            pooled = {pid for pool in list(self.pools) for pid in self._pids(pool.name)}
            return [pid for pid in _family(os.getpid()) if pid not in pooled]
        roots = [pid for pool in list(self.pools) if pool.name == stage for pid in pool.pids]
        return [pid for root in roots for pid in _family(root)]

    def _read(self) -> dict[str, float]:
        """Return all CPU seconds so far, and for how long this thread has waited for a core."""
        found = defaultdict(float, {WORKERS: time.process_time()})
        with contextlib.suppress(OSError, ValueError):
            found[QUEUED] = int(_SCHEDULED.read_text().split()[1]) / 1e9
        for stage in {pool.name for pool in list(self.pools)}:
            for pid in self._pids(stage):
                with contextlib.suppress(psutil.Error):
                    found[stage] += sum(psutil.Process(pid).cpu_times()[:4])
        return found


PINS = CorePins()
"""Of this process."""


def _threads(pids: Iterable[int]) -> Iterator[int]:
    for pid in pids:
        with contextlib.suppress(OSError):
            yield from (int(one.name) for one in Path(f"/proc/{pid}/task").iterdir())


def _affinities(threads: Iterable[int]) -> Iterator[tuple[int, set[int]]]:
    for thread in threads:
        with contextlib.suppress(OSError):  # it has just ended
            yield thread, os.sched_getaffinity(thread)


def _keep_to(threads: Iterable[int], cores: Collection[int]) -> None:
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, cores)


def _family(pid: int) -> Iterator[int]:
    """Yield a process and all that it has started."""
    yield pid
    for thread in _threads([pid]):
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
            for child in map(int, children):
                yield from _family(child)
