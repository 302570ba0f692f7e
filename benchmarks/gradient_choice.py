"""Sums of gradients: `parallel.gradients=auto` against the same way for all units.

    python benchmarks/gradient_choice.py [--links 100mbit,400mbit] [--seconds 15]

Two ranks, each on a host and a core of its own (network namespaces; see tests/netlab.py; needs
root), and over this machine's loopback, run backwards of three models under FSDP2: layers that are
alike with little to compute and with much, and one large unit behind small ones. Arms take turns in
one run; a round counts as long as the slowest rank takes, sums and codecs included, and medians are
compared:

* `auto`, with the ways that the setting has, against the best of all-full, all-int8 and all-int4;
* `auto` that may also take the largest values (1% with error feedback, whose memory the setting
  does not ask for), against the best of these and all-top-k. Units of one size share the feedback:
  what is measured is time.

Then `two_level_int4` on two hosts of two ranks against float32 all to all; and the choice alone:
against trying everything, and its own seconds for 200 units.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from figures import report
from other_codecs import ErrorFeedback, TopK
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from choice_cases import least, random_case, way
from netlab import Host, network

from hybridrl.controller import WorkerContext
from hybridrl.controller.worker import Rendezvous
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.parallel.compressed_collectives import (
    INT4_CODEC,
    INT8_CODEC,
    CompressedReduceScatter,
    ReductionHop,
)
from hybridrl.parallel.gradient_reduction import make_reduce_scatter
from hybridrl.parallel.measured_reduction import MeasuredReduceScatter, UnitReduceScatter
from hybridrl.parallel.process_group import ParallelMesh, join_group_world
from hybridrl.parallel.reduction_choice import (
    FULL_REDUCTION,
    GradientBucket,
    choose_methods,
)

CPU = torch.device("cpu")
PORT = 29641
# Name: (inputs, outputs) of each unit, and tokens.
MODELS = {
    "light": ([(512, 512)] * 6, 64),
    "heavy": ([(512, 512)] * 6, 4096),
    "uneven": ([(64, 64)] * 8 + [(64, 16384)], 256),
}
SAME = ("full", "int8", "int4")
TWO_LEVEL_VALUES = 1 << 20
LEAST_ROUNDS = 5


class Largest:
    """`TopK(0.01)` with error feedback, as a codec."""

    def __init__(self) -> None:
        self._feedback: dict[int, ErrorFeedback] = {}

    def size(self, numel: int) -> int:
        return TopK(0.01).size(numel)

    def encode(self, values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        feedback = self._feedback.setdefault(values.numel(), ErrorFeedback(TopK(0.01)))
        return feedback.encode(values, out)

    def decode(self, encoded: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return TopK(0.01).decode(encoded, numel, dtype)


class Nobody:
    """Takes no notes."""

    def note(self, *_: Any) -> None:
        pass


def measured(
    units: Sequence[FSDPModule], values: Sequence[int], ways: Mapping[str, CompressedReduceScatter]
) -> MeasuredReduceScatter:
    sums = MeasuredReduceScatter(ways, dist.group.WORLD, CPU)
    sums.install(units, values)
    return sums


def backwards(name: str, limit: float) -> dict[str, Any]:
    """Median seconds of a backward of a model, by arm, and what each `auto` chose."""
    sizes, tokens = MODELS[name]
    torch.manual_seed(0)
    layers = [nn.Linear(inputs, outputs, bias=False) for inputs, outputs in sizes]
    model = nn.Sequential(*layers)
    mesh = ParallelMesh(RankMesh({"dp": 2}), CPU).fsdp
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for layer in layers:
        layer.set_gradient_divide_factor(1.0)
        layer.set_force_sum_reduction_for_comms(True)
    values = [inputs * outputs for inputs, outputs in sizes]
    lossy = {"int8": INT8_CODEC, "int4": INT4_CODEC, "top_k": Largest()}
    ways = {
        name: CompressedReduceScatter([ReductionHop(dist.group.WORLD, codec)])
        for name, codec in {"float32": None, **lossy}.items()
    }
    without = {name: way for name, way in ways.items() if name != "top_k"}
    autos = {"auto": measured(layers, values, without)}
    autos["auto_top_k"] = measured(layers, values, ways)
    arms: dict[str, Sequence[Any]] = {arm: auto.units for arm, auto in autos.items()}
    arms[FULL_REDUCTION] = [UnitReduceScatter(Nobody(), 0)] * len(layers)
    for arm in lossy:
        arms[arm] = [ways[arm]] * len(layers)
    inputs = torch.randn(tokens, sizes[0][0])
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    order = list(arms)
    until = time.monotonic() + limit
    while agreed(time.monotonic() < until) or len(seconds[FULL_REDUCTION]) < LEAST_ROUNDS:
        order = [*order[1:], order[0]]
        for arm in order:
            for layer, one in zip(layers, arms[arm], strict=True):
                layer.set_custom_reduce_scatter(one)
            loss = model(inputs).square().mean()
            seconds[arm].append(slowest(loss.backward))
            model.zero_grad()
    for auto in autos.values():
        auto._sums.clear()
    found = {arm: statistics.median(taken) for arm, taken in seconds.items()}
    return {"seconds": found, "chose": {a: m.choice.sentence() for a, m in autos.items()}}


def slowest(work: Callable[[], Any]) -> float:
    """Seconds of the rank that takes longest."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def agreed(mine: bool) -> bool:
    """What the first rank says."""
    said = torch.tensor(mine)
    dist.broadcast(said, 0)
    return bool(said)


def two_level(limit: float) -> dict[str, float]:
    """Median seconds of a sum over all ranks in two levels, and of float32 all to all."""
    ranks = dist.get_world_size()
    arms = {
        "two_level_int4": make_reduce_scatter("two_level_int4", [list(range(ranks))]),
        "float32": CompressedReduceScatter([ReductionHop(dist.group.WORLD, None)]),
    }
    values, out = torch.randn(TWO_LEVEL_VALUES), torch.empty(TWO_LEVEL_VALUES // ranks)
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    until = time.monotonic() + limit
    while agreed(time.monotonic() < until):
        for arm, sums in arms.items():
            once = partial(sums, out, values, dist.group.WORLD, dist.ReduceOp.SUM)
            seconds[arm].append(slowest(once))
    return {arm: statistics.median(taken) for arm, taken in seconds.items()}


def run_rank(rank: int, ranks: int, address: str, limit: float) -> None:
    torch.set_num_threads(1)
    listener = socket.create_server((address, PORT)) if rank == 0 else None
    join_group_world(
        WorkerContext("actor", rank, ranks, rendezvous=Rendezvous(address, PORT, listener))
    )
    if ranks > 2:
        found: dict[str, Any] = two_level(limit)
    else:
        found = {name: backwards(name, limit) for name in MODELS}
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def places(link: str, ranks: int) -> Iterator[list[Host | None]]:
    """Where each rank runs: hosts of as many ranks each, or this machine."""
    if link == "loopback":
        yield [None] * ranks
        return
    cores = [{0}, {1}] if (os.cpu_count() or 1) > 1 else None
    with network(2, link, cpus=cores) as hosts:
        yield [host for host in hosts for _ in range(ranks // 2)]


def measure(link: str, ranks: int, limit: float) -> dict[str, Any]:
    """What the first of the ranks found."""
    with places(link, ranks) as hosts:
        address = hosts[0].address if hosts[0] else "127.0.0.1"
        # Namespaces share the machine's host name, by which gloo would look for an address.
        interface = {"GLOO_SOCKET_IFNAME": "eth0" if hosts[0] else "lo", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **interface}
        started = []
        for rank, host in enumerate(hosts):
            command = [sys.executable, __file__, "--rank"]
            command += [str(rank), str(ranks), address, str(limit)]
            start = host.popen if host else subprocess.Popen
            started.append(start(command, stdout=subprocess.PIPE, text=True, env=environment))
        said = [one.communicate()[0] for one in started]
    # Not by the exit code: on a busy machine a process that was done was seen to abort as it left.
    for line in said[0].splitlines():
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit("A rank ended with an error, which stands above.")


def tell(link: str, found: dict[str, Any]) -> None:
    for model, regime in found.items():
        seconds = regime["seconds"]
        for auto, others in (("auto", SAME), ("auto_top_k", (*SAME, "top_k"))):
            best = min(others, key=seconds.__getitem__)
            name = f"gradient_choice.{link}.{model}.{auto}"
            print(f"# {name}: {regime['chose'][auto]}; the best other is all-{best}", flush=True)
            report(name, seconds[auto], seconds[best], "<= 1.03", "s")
        for arm in ("int8", "int4", "top_k"):
            name = f"gradient_choice.{link}.{model}.all_{arm}"
            report(name, seconds[arm], seconds[FULL_REDUCTION], "as it is", "s")


def choices() -> None:
    """The choice alone."""
    close, cases = 0, 200
    for seed in range(cases):
        buckets, ways, beside = random_case(seed)
        close += choose_methods(buckets, ways, beside).seconds <= 1.03 * least(
            buckets, ways, beside
        )
    report("gradient_choice.within_3_percent_of_the_best", close, cases, ">= 0.95", "cases")
    ways = [way(FULL_REDUCTION), *(way(f"{n}", n / 10, n * 1e6, n / 1e4) for n in range(1, 9))]
    buckets = [GradientBucket(10_000 + number, number / 100) for number in range(200)]
    for name, beside in (("in_order", False), ("on_a_stream", True)):
        begin = time.process_time()
        choose_methods(buckets, ways, beside)
        taken = time.process_time() - begin
        report(f"gradient_choice.200_units.{name}", taken, 0.2, "<= 1", "s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--links", default="100mbit,400mbit", help="their rates; loopback is added")
    parser.add_argument("--seconds", type=float, default=15, help="of each model and link")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank, ranks, address, limit = options.rank
        run_rank(int(rank), int(ranks), address, float(limit))
        return
    choices()
    for link in [*filter(None, options.links.split(",")), "loopback"]:
        tell(link, measure(link, 2, options.seconds))
    found = measure("100mbit", 4, options.seconds)
    name = "gradient_choice.100mbit.two_level_int4_of_float32_all_to_all"
    report(name, found["two_level_int4"], found["float32"], "<= 0.333", "s")


if __name__ == "__main__":
    main()
