"""CoreIsolation (`resources=auto`): gives workers, and the pools of processes beside them, cores of
their own, as long as steps are quicker with them.

A window of steps is measured as it is. From what each stage takes of the cores follows its speed
curve, and from the curves the allocation with the quickest slowest stage. If that promises
anything, the next window tries it, and it is kept if its steps were quicker. All of this begins
anew when work moves from some stages to others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from hybridrl.controller.executor import Executor
from hybridrl.run.watchers.watcher import FinishedStep, Watcher
from hybridrl.system.core_allocation import allocate_cores, divide_cores
from hybridrl.system.core_pins import QUEUED, WALL, WORKERS, HostCores, StageCores
from hybridrl.system.cpu_cores import read_core_quota

WINDOW = 4
"""Steps that are measured together; the one before them, in which cores may change, is not."""
LEAST_GAIN = 0.03
"""The share of a step that has to be saved."""
MOST_LOSS = 0.1
"""What may promise to take this much longer is tried still, because nobody knows what stages cost
each other until they are apart."""
LEAST_OVERLAP = 0.05
"""Cores that pools take, on average, during a phase that is to be isolated from them."""
MIX_CHANGE = 0.1
"""The share of all work that moves between stages before it is another mix."""
Load = Mapping[tuple[int, str, str], float]
"""Seconds a step by host, phase and stage; see `hybridrl.system.core_pins`."""
Shares = Mapping[tuple[str, str], float]
Pins = dict[int, dict[str, StageCores]]
"""By host and phase."""


class CoreIsolation(Watcher):
    """A watcher that measures steps, pins stages to cores, and tells of both."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._devices = executor, executor.cluster.devices
        self._seconds: list[tuple[float, float]] = []  # of steps, and of a token in them
        self._load: dict[tuple[int, str, str], float] = defaultdict(float)
        self._before: tuple[float, float] | None = None  # a step without what is being tried
        self._mix: Shares | None = None
        self._is_pinned = False
        self._hosts = self._pin({})

    def on_step_end(self, step: FinishedStep) -> Iterator[str]:
        seconds, tokens = step.metrics["time/step"], step.metrics.get("response/tokens") or 1.0
        self._seconds.append((seconds, seconds / tokens))
        for record in step.records if len(self._seconds) > 1 else ():
            for phase, load in record.loads.items():
                for stage, taken in load.items():
                    self._load[record.host, phase, stage] += taken / WINDOW
        if len(self._seconds) <= WINDOW:
            return
        took, of_token = (median(column) for column in zip(*self._seconds[1:], strict=True))
        load, before, mix = dict(self._load), self._before, _shares_of(self._load)
        self._seconds.clear()
        self._load.clear()
        self._before = None
        if before is not None:
            self._is_pinned = of_token <= (1 - LEAST_GAIN) * before[1]
            said = f"a step takes {took:.2f} s with these cores, {before[0]:.2f} s without"
            yield f"resources=auto: {said}: {'kept' if self._is_pinned else 'nothing is pinned'}."
        elif self._mix is not None and _distance(self._mix, mix) < MIX_CHANGE:
            return
        elif self._is_pinned:  # what it takes without pins is measured first
            self._is_pinned, mix = False, None
        else:
            pins, said = self._solve(load)
            yield f"resources=auto: {said}. {'This is tried.' if pins else 'Nothing is pinned.'}"
            if pins:
                self._pin(pins)
                self._before = took, of_token
                return
        self._mix = mix
        if not self._is_pinned:
            self._pin({})

    def _pin(self, pins: Pins) -> list[HostCores]:
        hosts = range(len(self._devices))
        return self._executor.assign_cores([pins.get(host, {}) for host in hosts])

    def _solve(self, load: Load) -> tuple[Pins, str]:
        """Return what to try, and why, or why nothing, in words that tell of the busiest node."""
        if read_core_quota() is not None:
            return {}, "a CPU quota bounds the time of this container, but gives it no cores"
        pools: dict[str, float] = defaultdict(float)
        for (_, phase, stage), taken in load.items():
            pools[phase] += 0.0 if stage in (WALL, QUEUED, WORKERS) else taken
        phase = max(pools, key=pools.__getitem__, default="")
        nodes: dict[tuple[str, frozenset[int]], list[int]] = defaultdict(list)
        for host, (usable, _) in enumerate(self._hosts):
            if (host, phase, WALL) in load:
                nodes[self._devices[host].address, usable].append(host)
        pins: Pins = {}
        told = (0.0, "no processes work beside the workers")
        for (_, usable), hosts in nodes.items():
            of = {
                host: {s: t for (h, p, s), t in load.items() if (h, p) == (host, phase)}
                for host in hosts
            }
            wall = max(one[WALL] for one in of.values())
            found, said = self._solve_node(sorted(usable), phase, of)
            pins |= found
            told = max(told, (wall, said))
        return pins, told[1]

    def _solve_node(
        self, cores: Sequence[int], phase: str, of: Mapping[int, Mapping[str, float]]
    ) -> tuple[Pins, str]:
        wall = max(load[WALL] for load in of.values())
        stages = sorted({stage for load in of.values() for stage in load} - {WALL, QUEUED})
        work = {stage: sum(load.get(stage, 0.0) for load in of.values()) for stage in stages}
        if sum(work.values()) - work[WORKERS] < LEAST_OVERLAP * wall:
            return {}, "no processes work beside the workers"
        # Threads cannot be fewer, which would change the order of sums: they have a core each.
        bounds = {WORKERS: max(self._hosts[host].threads for host in of)}
        alone = {WORKERS: max(load[WALL] - load.get(QUEUED, 0.0) for load in of.values())}
        curves = {
            stage: [
                max(alone.get(stage, 0.0), work[stage] / n)
                if n >= bounds.get(stage, 1)
                else math.inf
                for n in range(1, len(cores) + 1)
            ]
            for stage in stages
        }
        seen = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in work.items())
        said = f"{phase} takes {wall:.2f} s a step, with {seen} core-seconds on {len(cores)} cores"
        if (number := allocate_cores(curves, len(cores))) is None:
            return {}, f"{said}, which are too few for each stage to have its own"
        number[WORKERS] += len(cores) - sum(number.values())
        promised = max(curves[stage][n - 1] for stage, n in number.items())
        apart = ", ".join(f"{stage} {n}" for stage, n in number.items())
        said = f"{said}; with cores of their own ({apart}) the slowest would take {promised:.2f} s"
        if promised > (1 + MOST_LOSS) * wall:
            return {}, said
        pins: Pins = {host: {phase: {}} for host in of}
        for stage in stages:
            mine, cores = cores[: number[stage]], cores[number[stage] :]
            for host, part in zip(of, divide_cores(mine, len(of)), strict=True):
                pins[host][phase] = {**pins[host][phase], stage: part}
        return pins, said


def _shares_of(load: Load) -> Shares:
    """Return the share of all work that each stage has in each phase."""
    work: dict[tuple[str, str], float] = defaultdict(float)
    for (_, phase, stage), taken in load.items():
        if stage not in (WALL, QUEUED):
            work[phase, stage] += taken
    total = sum(work.values()) or 1.0
    return {key: taken / total for key, taken in work.items()}


def _distance(before: Shares, now: Shares) -> float:
    return sum(abs(before.get(k, 0.0) - now.get(k, 0.0)) for k in {*before, *now}) / 2
