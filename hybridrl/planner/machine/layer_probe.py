"""A few seconds of measuring: the rates of this machine's devices, all of them at work at once.

Two layers of the job's own model run forward and backward on samples as long as the job's, so what
is measured is what training will do: products, attention and what lies between them.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import PretrainedConfig

from hybridrl.errors import HybridRLError
from hybridrl.models import Packing, load_config
from hybridrl.models.language_model import build_language_model, decoder_of
from hybridrl.models.packed_attention import NAME
from hybridrl.planner.machine.device_catalog import cores_per_device
from hybridrl.planner.machine.device_rates import Rates
from hybridrl.planner.memory.model_shape import narrowed, shape_of
from hybridrl.system.cluster_spec import Cluster
from hybridrl.system.device_traits import COLLECTIVES, make_current, synchronize
from hybridrl.system.dtypes import DTYPES

LAYERS = 2
SECONDS = 0.15
"""Of one measurement, at least."""
STREAM = 64 << 20
"""Bytes that are copied at a time."""
LEAST_MESSAGE = 1 << 20
"""Bytes that are sent at a time, if a layer has fewer."""
SMALL_OPS = 2000
WORK = 1e10
"""Operations of the longest run: the tokens of a whole micro-batch if that is no more, because what
fits into a cache is quicker by token than what does not."""
LIMIT_S = 60
TURNS_TOGETHER = 5
"""Of what the ranks do together: as many on each."""


Measure = Callable[..., dict[str, float]]


def probe(path: str, dtype: str, cluster: Cluster, tokens: int, length: float) -> Rates:
    """Measures.

    Args:
        path: Model folder.
        dtype: Name of the precision of computation.
        tokens: Of a micro-batch.
        length: Tokens of a sample.
    """
    found = on_all(measure_layers, cluster, path, dtype, tokens, round(length))
    mean = {name: sum(f[name] for f in found) / len(found) for name in found[0]}
    return Rates(**mean, source=f"a probe of {len(found)} device(s) of this machine")


def on_all(measure: Measure, cluster: Cluster, *job: Any) -> list[dict[str, float]]:
    """What `measure(rank, world, kind, threads, *job)` finds on each device of this machine that a
    cluster is made of, all at once, in processes that are a world to torch.distributed.

    Raises:
        HybridRLError: if a process fails.
    """
    here = cluster.devices_per_node
    if cluster.is_cuda:
        here = min(here, torch.accelerator.device_count())
    # One device has this process's own threads, whatever their number.
    threads = torch.get_num_threads() if here == 1 else cores_per_device(cluster)
    job = (cluster.kind, threads, *job)
    if here == 1:
        return [measure(0, 1, *job)]
    # A fork is quick, but what used GPUs or several threads before must not be forked.
    kind = "fork" if cluster.kind == "cpu" and threads == 1 else "spawn"
    context = mp.get_context(kind)
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        arguments = [(measure, rank, here, *job, f"{folder}/meet", queue) for rank in range(here)]
        processes = [context.Process(target=_child, args=a, daemon=True) for a in arguments]
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


def _child(measure: Measure, rank: int, world: int, *job: Any) -> None:
    *job_, meet, queue = job
    dist.init_process_group(
        COLLECTIVES[job_[0]],
        init_method=f"file://{meet}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    queue.put(measure(rank, world, *job_))
    dist.barrier()
    dist.destroy_process_group()


def measure_layers(
    rank: int, world: int, kind: str, threads: int, path: str, dtype: str, tokens: int, length: int
) -> dict[str, float]:
    """What one of several devices finds, all at once; see `probe`.

    Args:
        threads: Of this process, where there is more than one.
    """
    device = make_current(kind, rank)
    if world > 1:
        torch.set_num_threads(threads)
    config = load_config(path)
    model = _layers(config, dtype, device)
    shape = shape_of(config, dtype)
    operations = 2 * shape.layer.all + 2 * length * shape.query
    fitting = round(WORK / (LAYERS * 3 * operations))
    few = max(1, length)
    many = max(2, min(tokens, max(8 * length, 512, fitting)) // few) * few
    runs = [
        _run(model, device, number, few, trains)
        for trains in (False, True)
        for number in (few, many)
    ]
    seconds = [found / LAYERS for found in timed(runs, device, world)]
    found = {}
    for name, (low, high), passes in (("forward", seconds[:2], 1), ("training", seconds[2:], 3)):
        low = min(low, high)
        per_token = max(1e-12, (high - low) / (many - few))
        if per_token * many > high:
            per_token = high / many
        found[name] = passes * operations / per_token
        found[f"{name}_overhead"] = max(0.0, low - per_token * few)
    del model, runs
    found["memory"] = memory_rate(device, world)
    found["small_op"] = small_op(world)
    return found | collectives(device, world, shape.item * shape.layer.all)


def _layers(config: PretrainedConfig, dtype: str, device: torch.device) -> Any:
    few = narrowed(config, 1, LAYERS)
    few.get_text_config().vocab_size = min(few.get_text_config().vocab_size, 1024)
    with device:
        model = build_language_model(few, dtype=DTYPES[dtype], attn_implementation=NAME)
    return decoder_of(model).train()


def _run(
    model: Any, device: torch.device, tokens: int, length: int, trains: bool
) -> Callable[[], None]:
    """The layers, forward on so many tokens, and backward."""
    bounds = sample_bounds(tokens, length)
    packing = Packing.of(bounds, device)
    ids = torch.zeros(1, int(bounds[-1]), dtype=torch.int64, device=device)
    positions = packing.position_ids(ids.numel())[None]

    def once() -> None:
        with contextlib.nullcontext() if trains else torch.no_grad():
            states = model(
                input_ids=ids, position_ids=positions, packing=packing, use_cache=False
            ).last_hidden_state
        if trains:
            states.sum().backward()

    return once


def sample_bounds(tokens: int, length: int) -> torch.Tensor:
    """Of samples from half to one and a half times this length, as a step's differ."""
    shares = (torch.arange(tokens // length) + 0.5) / (tokens // length)
    lengths = (length * (0.5 + shares)).round().long().clamp(min=1)
    return torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])


def timed(
    runs: Sequence[Callable[[], object]],
    device: torch.device,
    world: int,
    turns: int = 3,
    least: float = SECONDS,
) -> list[float]:
    """Seconds of each run, the median of many: what else this machine does will slow the job, too.
    They take turns, so that what disturbs it for a moment does not hit one of them alone.

    Args:
        least: Seconds to spend on each run; 0: as often as there are turns.
    """
    for once in runs:
        once()
    synchronize(device)
    if world > 1:
        dist.barrier()
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(turns):
        for once, seconds in zip(runs, found, strict=True):
            start = end = time.perf_counter()
            while end == start or end - start < least / turns:
                begin = time.perf_counter()
                once()
                synchronize(device)
                end = time.perf_counter()
                seconds.append(end - begin)
    return [statistics.median(seconds) for seconds in found]


def memory_rate(device: torch.device, world: int) -> float:
    """Bytes per second, read and written."""
    source = torch.zeros(STREAM // 4, device=device)
    target = torch.zeros_like(source)
    (seconds,) = timed([lambda: target.copy_(source)], device, world)
    return 2 * STREAM / seconds


def small_op(world: int) -> float:
    """Seconds of an operation on a handful of numbers."""
    x = torch.zeros(4)

    def once() -> None:
        for _ in range(SMALL_OPS):
            x.add_(1.0)

    (seconds,) = timed([once], torch.device("cpu"), world)
    return seconds / SMALL_OPS


def collectives(device: torch.device, world: int, layer: int) -> dict[str, float]:
    """What a layer of so many bytes takes to be gathered, and its gradients to be summed. Into new
    memory, as in training: whoever writes there first waits for the system to find some."""
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
        gathering, reducing = timed([gather, reduce], device, world, TURNS_TOGETHER, 0.0)
    link = part.nbytes * (world - 1) / gathering
    return {"link": link, "network": link, "sums": reducing / gathering}
