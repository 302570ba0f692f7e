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
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, PretrainedConfig

from hybridrl.core.cluster import Cluster
from hybridrl.core.device import COLLECTIVES, make_current, synchronize
from hybridrl.core.dtypes import DTYPES
from hybridrl.errors import HybridRLError
from hybridrl.models import Packing, load_config
from hybridrl.models.attention import NAME
from hybridrl.planner.devices import Machines, cores_per_device
from hybridrl.planner.model_shape import narrowed, shape_of
from hybridrl.planner.step_time import Rates

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
ROUNDS = 5
"""Of what the ranks do together: as many on each."""


def probe(path: str, dtype: str, machines: Machines, tokens: int, length: float) -> Rates:
    """Measures.

    Args:
        path: Model folder.
        dtype: Name of the precision of computation.
        tokens: Of a micro-batch.
        length: Tokens of a sample.
    """
    cluster, here = machines.cluster, machines.devices_per_node
    if machines.is_cuda:
        here = min(here, torch.accelerator.device_count())
    # One device has this process's own threads, whatever their number.
    threads = torch.get_num_threads() if here == 1 else cores_per_device(cluster)
    job = (cluster.kind, threads, path, dtype, tokens, round(length))
    if here == 1:
        found = [_measure(0, 1, *job)]
    else:
        found = _on_all(cluster, here, threads, job)
    mean = {name: sum(f[name] for f in found) / len(found) for name in found[0]}
    return Rates(**mean, source=f"a probe of {here} device(s) of this machine")


def _on_all(cluster: Cluster, here: int, threads: int, job: tuple[Any, ...]) -> list[Any]:
    # A fork is quick, but what used GPUs or several threads before must not be forked.
    kind = "fork" if cluster.kind == "cpu" and threads == 1 else "spawn"
    context = mp.get_context(kind)
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        arguments = [(rank, here, *job, f"{folder}/meet", queue) for rank in range(here)]
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


def _child(rank: int, world: int, *job: Any) -> None:
    *job_, meet, queue = job
    dist.init_process_group(
        COLLECTIVES[job_[0]],
        init_method=f"file://{meet}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    queue.put(_measure(rank, world, *job_))
    dist.barrier()
    dist.destroy_process_group()


def _measure(
    rank: int, world: int, kind: str, threads: int, path: str, dtype: str, tokens: int, length: int
) -> dict[str, float]:
    device = make_current(kind, rank)
    if world > 1:
        torch.set_num_threads(threads)
    config = load_config(path)
    model = _layers(config, dtype, device)
    run = _Run(model, device)
    shape = shape_of(config, dtype)
    operations = 2 * shape.layer.all + 2 * length * shape.query
    fitting = round(WORK / (LAYERS * 3 * operations))
    few = max(1, length)
    many = max(2, min(tokens, max(8 * length, 512, fitting)) // few) * few
    forward = [run.seconds(n, few, trains=False, world=world) / LAYERS for n in (few, many)]
    training = [run.seconds(n, few, trains=True, world=world) / LAYERS for n in (few, many)]
    found = {}
    for name, (low, high), passes in (("forward", forward, 1), ("training", training, 3)):
        per_token = max(1e-12, (high - low) / (many - few))
        if per_token * many > high:
            per_token = high / many
        found[name] = passes * operations / per_token
        found[f"{name}_overhead"] = max(0.0, low - per_token * few)
    del model, run
    found["memory"] = _memory_rate(device, world)
    found["small_op"] = _small_op(world)
    return found | _collectives(device, world, shape.item * shape.layer.all)


def _layers(config: PretrainedConfig, dtype: str, device: torch.device) -> Any:
    few = narrowed(config, 1, LAYERS)
    few.get_text_config().vocab_size = min(few.get_text_config().vocab_size, 1024)
    with device:
        model = AutoModelForCausalLM.from_config(few, dtype=DTYPES[dtype], attn_implementation=NAME)
    return model.base_model.train()


class _Run:
    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device = model, device

    def seconds(self, tokens: int, length: int, *, trains: bool, world: int) -> float:
        bounds = _bounds(tokens, length)
        packing = Packing.of(bounds, self.device)
        ids = torch.zeros(1, int(bounds[-1]), dtype=torch.int64, device=self.device)
        positions = packing.position_ids()[None]

        def once() -> None:
            with contextlib.nullcontext() if trains else torch.no_grad():
                states = self.model(
                    input_ids=ids, position_ids=positions, packing=packing, use_cache=False
                ).last_hidden_state
            if trains:
                states.sum().backward()

        found = _timed(once, self.device, world)
        self.model.zero_grad()
        return found


def _bounds(tokens: int, length: int) -> torch.Tensor:
    """Of samples from half to one and a half times this length, as a step's differ."""
    shares = (torch.arange(tokens // length) + 0.5) / (tokens // length)
    lengths = (length * (0.5 + shares)).round().long().clamp(min=1)
    return torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])


def _timed(
    once: Callable[[], object], device: torch.device, world: int, rounds: int | None = None
) -> float:
    """Seconds of one run, the median of `rounds`, or of as many as fit into `SECONDS`: what else
    this machine does will slow the job, too."""
    once()
    synchronize(device)
    if world > 1:
        dist.barrier()
    found: list[float] = []
    start = time.perf_counter()

    def is_enough() -> bool:
        if rounds is not None:
            return len(found) >= rounds
        return len(found) >= 3 and time.perf_counter() - start > SECONDS

    while not is_enough():
        begin = time.perf_counter()
        once()
        synchronize(device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def _memory_rate(device: torch.device, world: int) -> float:
    source = torch.zeros(STREAM // 4, device=device)
    target = torch.zeros_like(source)
    return 2 * STREAM / _timed(lambda: target.copy_(source), device, world)


def _small_op(world: int) -> float:
    x = torch.zeros(4)

    def once() -> None:
        for _ in range(SMALL_OPS):
            x.add_(1.0)

    return _timed(once, torch.device("cpu"), world) / SMALL_OPS


def _collectives(device: torch.device, world: int, layer: int) -> dict[str, float]:
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
        gathering = _timed(gather, device, world, ROUNDS)
        reducing = _timed(reduce, device, world, ROUNDS)
    link = part.nbytes * (world - 1) / gathering
    return {"link": link, "network": link, "sums": reducing / gathering}
