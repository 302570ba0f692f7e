"""CoreIsolation (`resources=auto`): keeps the pools of processes beside workers to cores of their
own, so that workers have the others for themselves, as long as steps are quicker that way.

A window of steps is measured as it is. From what each stage takes of the cores follows its speed
curve, and from the curves the allocation with the quickest slowest stage. If that promises to save
time, the next window tries it, and it is kept if its steps were quicker. All of this begins anew
when work moves from some stages to others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from statistics import median

from hybridrl.controller.executor import Executor
from hybridrl.run.watchers.watcher import FinishedStep, Watcher
from hybridrl.system.core_pins import QUEUED, WALL, WORKERS, PoolCores, add_load

WINDOW = 4
"""Steps that are measured together; the one before them, in which cores may change, is not."""
LEAST_GAIN = 0.03
"""The share of a step that has to be saved. Pools that take less of one core have none to
themselves."""
MIX_CHANGE = 0.1
"""How far the share of pools in all work moves before it is another mix."""
Load = Mapping[str, float]
"""Seconds of a phase by stage; see `hybridrl.system.core_pins`."""
Pins = dict[int, dict[str, PoolCores]]
"""By host and phase."""


class CoreIsolation(Watcher):
    """A watcher that measures steps, pins pools to cores, and tells of both."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._devices = executor, executor.cluster.devices
        self._before: float | None = None  # seconds a token without the pins that are tried
        self._mix = math.inf
        self._pin({})

    def _pin(self, pins: Pins) -> None:
        self._is_pinned, hosts = bool(pins), range(len(self._devices))
        self._hosts = self._executor.assign_cores([pins.get(host, {}) for host in hosts])
        self._begin_window()

    def _begin_window(self) -> None:
        self._seconds: list[float] = []  # a token
        self._loads: dict[tuple[int, str], dict[str, float]] = defaultdict(dict)

    def on_step_end(self, step: FinishedStep) -> Iterator[str]:
        tokens = step.metrics.get("response/tokens") or 1.0
        self._seconds.append(step.metrics["time/step"] / tokens)
        for record in step.records if len(self._seconds) > 1 else ():
            for phase, load in record.loads.items():
                add_load(self._loads[record.host, phase], load, 1 / WINDOW)
        if len(self._seconds) <= WINDOW:
            return
        took, loads, total = median(self._seconds[1:]), self._loads, dict[str, float]()
        self._begin_window()
        for load in loads.values():
            add_load(total, load)
        mix = _of_pools(total) / (_of_pools(total) + total.get(WORKERS, 0.0) or 1.0)
        if self._before is not None:
            with_pins, without = took * tokens, self._before * tokens
            is_quicker, self._before = with_pins <= (1 - LEAST_GAIN) * without, None
            said = f"a step takes {with_pins:.2f} s with these cores, {without:.2f} s without"
            yield f"resources=auto: {said}: {'kept' if is_quicker else 'nothing is pinned'}."
            if is_quicker:
                self._mix = mix  # as it is with pins
            else:
                self._pin({})
        elif abs(mix - self._mix) >= MIX_CHANGE and self._is_pinned:
            self._mix = math.inf  # so that it is solved once it is known what a step takes without
            self._pin({})
        elif abs(mix - self._mix) >= MIX_CHANGE:
            self._mix = mix
            pins, said = self._solve(loads)
            yield f"resources=auto: {said}. {'This is tried.' if pins else 'Nothing is pinned.'}"
            if pins:
                self._before = took
                self._pin(pins)

    def _solve(self, loads: Mapping[tuple[int, str], Load]) -> tuple[Pins, str]:
        """Return what to try, and why, or why nothing."""
        nodes: dict[tuple[str, frozenset[int]], list[int]] = defaultdict(list)
        for host, cores in enumerate(self._hosts):
            nodes[self._devices[host].node, cores].append(host)
        pins, told = Pins(), ""
        for hosts in nodes.values():
            found, said = self._solve_node(hosts, loads)
            pins |= {host: found for host in hosts if found}
            told = said if found or not told else told
        return pins, told or "the cores of the workers are not known"

    def _solve_node(
        self, hosts: Sequence[int], loads: Mapping[tuple[int, str], Load]
    ) -> tuple[dict[str, PoolCores], str]:
        """Solve the phase of these hosts beside which pools work most."""
        phases: dict[str, list[Load]] = defaultdict(list)
        for (host, phase), load in loads.items():
            phases[phase] += [load] if host in hosts else []
        phase = max(phases, key=lambda one: sum(map(_of_pools, phases[one])), default="")
        if not phases.get(phase):
            return {}, "no step was measured"
        if not (cores := sorted(self._hosts[hosts[0]])):
            return {}, "a quota bounds the time of the container, but gives it no cores"
        total: dict[str, float] = {}
        for load in phases[phase]:
            add_load(total, load)
        wall = max(load[WALL] for load in phases[phase])
        stages = {name: taken for name, taken in total.items() if name not in (WALL, QUEUED)}
        curves = {
            stage: [taken / n for n in range(1, len(cores) + 1)]
            for stage, taken in stages.items()
            if stage == WORKERS or taken > LEAST_GAIN * wall
        }
        # Workers wait for a core because of pools no longer than these had one.
        floor = max(load[WALL] - min(load[QUEUED], _of_pools(total)) for load in phases[phase])
        curves[WORKERS] = [max(floor, taken) for taken in curves[WORKERS]]
        seen = ", ".join(f"{stage} {taken:.2f}" for stage, taken in stages.items())
        said = f"{phase} takes {wall:.2f} s a step, with {seen} core-seconds on {len(cores)} cores"
        if (numbers := allocate_cores(curves, len(cores))) is None:
            return {}, f"{said}, which are too few for each stage to have its own"
        numbers[WORKERS] += len(cores) - sum(numbers.values())
        slowest = max(curves[stage][number - 1] for stage, number in numbers.items())
        apart = ", ".join(f"{stage} {number}" for stage, number in numbers.items())
        said += f"; with cores of their own ({apart}) the slowest would take {slowest:.2f} s"
        if slowest > (1 - LEAST_GAIN) * wall:
            return {}, said
        left = iter(cores[numbers.pop(WORKERS) :])
        return {phase: {pool: frozenset(islice(left, n)) for pool, n in numbers.items()}}, said


def allocate_cores(curves: Mapping[str, Sequence[float]], cores: int) -> dict[str, int] | None:
    """Return the number of cores of each stage with which the slowest stage takes least, and no
    stage has more of them than that needs; None if there are too few cores.

    Args:
        curves: What each stage takes with 1, 2, ... cores. Infinite where it may not have so many.
    """
    for bound in sorted({taken for curve in curves.values() for taken in curve} - {math.inf}):
        fewest = {
            stage: next((n for n, taken in enumerate(curve, 1) if taken <= bound), cores + 1)
            for stage, curve in curves.items()
        }
        if sum(fewest.values()) <= cores:
            return fewest
    return None


def _of_pools(load: Load) -> float:
    return sum(taken for name, taken in load.items() if name not in (WALL, QUEUED, WORKERS))
