"""Measurements of all devices of this machine at once: copies, small operations and collectives, in
processes that are a world to torch.distributed."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybridrl.errors import HybridRLError
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.system.container_limits import count_usable_cores
from hybridrl.system.device_traits import COLLECTIVE_BACKENDS, set_current_device
from hybridrl.system.timing import measure_seconds

STREAM = 64 << 20
"""Bytes that are copied at a time."""
LEAST_MESSAGE = 1 << 20
"""Bytes that are sent at a time, if a layer has fewer."""
SMALL_OPS = 2000
LIMIT_S = 60
TURNS_TOGETHER = 5
"""Of what the ranks do together: as many on each."""

MeasureFunction = Callable[..., dict[str, float]]


def mean_of_all(measure: MeasureFunction, cluster: ClusterSpec, *job: Any) -> dict[str, float]:
    """Return the mean of each figure that this machine's devices find; see `measure_on_all`."""
    found = measure_on_all(measure, cluster, *job)
    return {name: sum(one[name] for one in found) / len(found) for name in found[0]}


def measure_on_all(measure: Callable[..., Any], cluster: ClusterSpec, *job: Any) -> list[Any]:
    """Return what `measure(device, world, *job)` finds on each device of this machine that a
    cluster is made of, all at once, in processes that are a world to torch.distributed.

    Raises:
        HybridRLError: if a process fails.
    """
    here = cluster.devices_per_node
    if cluster.is_cuda:
        here = min(here, torch.accelerator.device_count())
    if here == 1:  # it has this process's own threads, whatever their number
        return [measure(set_current_device(cluster.kind, 0), 1, *job)]
    threads = max(1, count_usable_cores() // cluster.devices_per_node)
    # A fork is quick, but what used GPUs or several threads before must not be forked.
    kind = "fork" if cluster.kind == "cpu" and threads == 1 else "spawn"
    context: Any = mp.get_context(kind)
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        given = (here, cluster.kind, threads, f"{folder}/meet", queue, measure, job)
        processes = [
            context.Process(target=_child, args=(rank, *given), daemon=True) for rank in range(here)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT_S)
            process.kill()
        if any(process.exitcode for process in processes):
            raise HybridRLError(
                f"A process of the probe failed, or took more than {LIMIT_S} s; its words stand "
                "above. --devices plans with known rates instead."
            )
        return [queue.get() for _ in processes]


def _child(
    rank: int,
    world: int,
    kind: str,
    threads: int,
    meet: str,
    queue: Any,
    measure: Callable[..., Any],
    job: Sequence[Any],
) -> None:
    dist.init_process_group(
        COLLECTIVE_BACKENDS[kind],
        init_method=f"file://{meet}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    torch.set_num_threads(threads)
    queue.put(measure(set_current_device(kind, rank), world, *job))
    dist.barrier()
    dist.destroy_process_group()


def measure_memory_rate(device: torch.device, world: int) -> float:
    """Measure the bytes of memory that are read and written per second."""
    source = torch.zeros(STREAM // 4, device=device)
    target = torch.zeros_like(source)
    (seconds,) = measure_seconds([lambda: target.copy_(source)], device, world=world)
    return 2 * STREAM / seconds


def measure_small_op(world: int) -> float:
    """Measure the seconds of an operation on a few numbers."""
    x = torch.zeros(4)

    def once() -> None:
        for _ in range(SMALL_OPS):
            x.add_(1.0)

    (seconds,) = measure_seconds([once], torch.device("cpu"), world=world)
    return seconds / SMALL_OPS


def collectives(device: torch.device, world: int, layer: int) -> dict[str, float]:
    """Measure a gather of a layer of this many bytes and the sum of its gradients, into new memory
    as in training."""
    if world == 1:
        return {"link": math.inf, "network": math.inf, "sums": 1.0}
    part = torch.zeros(min(max(layer, LEAST_MESSAGE), STREAM) // 4 // world, device=device)
    numbers = len(part) * world

    def gather() -> None:
        dist.all_gather_into_tensor(torch.empty(numbers, device=device), part)

    def reduce() -> None:
        dist.reduce_scatter_tensor(torch.empty_like(part), torch.zeros(numbers, device=device))

    with warnings.catch_warnings():  # newer versions of torch prefer names that older ones lack
        warnings.simplefilter("ignore", FutureWarning)
        gathering, reducing = measure_seconds(
            [gather, reduce], device, world=world, turns=TURNS_TOGETHER, least=0.0
        )
    link = part.nbytes * (world - 1) / gathering
    return {"link": link, "network": link, "sums": reducing / gathering}
