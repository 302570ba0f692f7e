"""The one loop that times what plans and choices rest on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hybridrl.system.device_traits import synchronize_device

SECONDS = 0.15
"""To spend on a run, at least."""


def measure_seconds(
    runs: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    world: int = 1,
    turns: int = 3,
    least: float = SECONDS,
    between: Callable[[], object] | None = None,
) -> list[float]:
    """Return the median seconds of each run: what else this machine does will slow a job, too.

    Runs take turns, so that what disturbs the machine for a moment does not hit one of them alone.

    Args:
        world: Ranks that measure at once and begin together.
        least: Seconds to spend on each run. With 0 a run is made once a turn: as often on every
            rank, which runs that are collectives need.
        between: Done before each run, in nobody's time, such as emptying caches.
    """
    for once in runs:
        once()
    synchronize_device(device)
    if world > 1:
        dist.barrier()
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(turns):
        for once, seconds in zip(runs, found, strict=True):
            spent = 0.0
            while not spent or spent < least / turns:
                if between is not None:
                    between()
                    synchronize_device(device)
                begin = time.perf_counter()
                once()
                synchronize_device(device)
                seconds.append(time.perf_counter() - begin)
                spent += max(seconds[-1], 1e-9)
    return [statistics.median(seconds) for seconds in found]
