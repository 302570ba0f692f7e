"""CoreIsolation (`resources=auto`): gives workers, and the pools of processes beside them, cores of
their own, as long as steps are quicker with them.

A window of steps is measured as it is. From what each stage takes of the cores follows its speed
curve, and from the curves the allocation with the quickest slowest stage. If that promises
anything, the next window tries it, and it is kept if its steps were quicker. All of this begins
anew when work moves from some stages to others.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
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
"""How far the share of pools in all work moves before it is another mix."""
Load = Mapping[str, float]
"""Seconds of a phase by stage; see `hybridrl.system.core_pins`."""
Pins = dict[int, dict[str, StageCores]]
"""By host and phase."""


class CoreIsolation(Watcher):
    """A watcher that measures steps, pins stages to cores, and tells of both."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._devices = executor, executor.cluster.devices
        self._begin_window()
        self._before: tuple[float, float] | None = None  # a step without what is being tried
        self._mix = math.inf
        self._is_pinned = False
        self._hosts = self._pin({})

    def _begin_window(self) -> None:
        self._seconds: list[tuple[float, float]] = []  # of steps, and of a token in them
        self._load: dict[int, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))

    def on_step_end(self, step: FinishedStep) -> Iterator[str]:
        seconds, tokens = step.metrics["time/step"], step.metrics.get("response/tokens") or 1.0
        self._seconds.append((seconds, seconds / tokens))
        for record in step.records if len(self._seconds) > 1 else ():
            for phase, load in record.loads.items():
                of_window = self._load[record.host][phase]
                of_window.update({stage: taken / WINDOW for stage, taken in load.items()})
        if len(self._seconds) <= WINDOW:
            return
        took, of_token = (median(column) for column in zip(*self._seconds[1:], strict=True))
        load, before, self._before = self._load, self._before, None
        self._begin_window()
        phases = [one for of_host in load.values() for one in of_host.values()]
        all_work = sum(_of_pools(one) + one[WORKERS] for one in phases)
        mix = sum(map(_of_pools, phases)) / (all_work or 1.0)
        if before is not None:
            self._is_pinned = of_token <= (1 - LEAST_GAIN) * before[1]
            said = f"a step takes {took:.2f} s with these cores, {before[0]:.2f} s without"
            yield f"resources=auto: {said}: {'kept' if self._is_pinned else 'nothing is pinned'}."
        elif abs(self._mix - mix) < MIX_CHANGE:
            return
        elif self._is_pinned:  # what it takes without pins is measured first
            self._is_pinned, mix = False, math.inf
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

    def _solve(self, load: Mapping[int, Mapping[str, Load]]) -> tuple[Pins, str]:
        """Return what to try, and why, or why nothing, in words that tell of the busiest node."""
        if read_core_quota() is not None:
            return {}, "a CPU quota bounds the time of this container, but gives it no cores"
        phases = sorted({phase for of_host in load.values() for phase in of_host})
        beside = {p: sum(_of_pools(one[p]) for one in load.values() if p in one) for p in phases}
        phase = max(phases, key=beside.__getitem__, default="")
        nodes: dict[tuple[str, frozenset[int]], dict[int, Load]] = defaultdict(dict)
        for host, (usable, _) in enumerate(self._hosts):
            if load.get(host, {}).get(phase):
                nodes[self._devices[host].node, usable][host] = load[host][phase]
        pins: Pins = {}
        told = (-1.0, "no step was measured")
        for (_, usable), of in nodes.items():
            found, said = self._solve_node(sorted(usable), phase, of)
            pins |= found
            told = max(told, (sum(map(_of_pools, of.values())), said))
        return pins, told[1]

    def _solve_node(
        self, cores: Sequence[int], phase: str, of: Mapping[int, Load]
    ) -> tuple[Pins, str]:
        total: Counter[str] = Counter()
        for load in of.values():
            total.update(load)
        stages = {stage: taken for stage, taken in total.items() if stage not in (WALL, QUEUED)}
        wall, pools = max(load[WALL] for load in of.values()), _of_pools(total)
        if pools < LEAST_OVERLAP * wall:
            return {}, f"processes beside the workers take {pools:.2f} core-seconds of a step"

        def curve(stage: str) -> list[float]:
            least, floor = 1, 0.0
            if stage == WORKERS:  # threads are never fewer, which would change the order of sums
                least = max(self._hosts[host].threads for host in of)
                floor = max(load[WALL] - load.get(QUEUED, 0.0) for load in of.values())
            found = [max(floor, stages[stage] / n) for n in range(1, len(cores) + 1)]
            return [math.inf] * (least - 1) + found[least - 1 :]

        curves = {stage: curve(stage) for stage in stages}
        seen = ", ".join(f"{stage} {taken:.2f}" for stage, taken in stages.items())
        said = f"{phase} takes {wall:.2f} s a step, with {seen} core-seconds on {len(cores)} cores"
        if (number := allocate_cores(curves, len(cores))) is None:
            return {}, f"{said}, which are too few for each stage to have its own"
        number[WORKERS] += len(cores) - sum(number.values())
        promised = max(curves[stage][n - 1] for stage, n in number.items())
        apart = ", ".join(f"{stage} {n}" for stage, n in number.items())
        said += f"; with cores of their own ({apart}) the slowest would take {promised:.2f} s"
        if promised > (1 + MOST_LOSS) * wall:
            return {}, said
        parts: dict[str, list[list[int]]] = {}
        for stage, n in number.items():
            parts[stage], cores = divide_cores(cores[:n], len(of)), cores[n:]
        return {
            host: {phase: {stage: parts[stage][place] for stage in parts}}
            for place, host in enumerate(of)
        }, said


def _of_pools(load: Load) -> float:
    """Return the core-seconds of all pools."""
    return sum(taken for name, taken in load.items() if name not in (WALL, QUEUED, WORKERS))
