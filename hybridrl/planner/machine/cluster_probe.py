"""A few seconds of measuring that knows no model: matrix products by precision, memory, messages
between the devices of this machine, its disk. What is found is kept for the next time."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.errors import ConfigError
from hybridrl.models.int8_matmul import int8_product
from hybridrl.models.row_quantization import Rows
from hybridrl.planner.machine.device_catalog import ACCELERATORS, present
from hybridrl.planner.machine.layer_probe import collectives, memory_rate, on_all, small_op, timed
from hybridrl.planner.machine.measurement_cache import cache_file, write_cached
from hybridrl.system.cluster_spec import Cluster, DeviceModel, Host, Link
from hybridrl.system.cpu_cores import usable_cores
from hybridrl.system.device_traits import make_current

SIDE = {"cpu": 256}
SIDE_OF_ACCELERATORS = 4096
"""Of the matrices that are multiplied."""
MESSAGE = 32 << 20
"""Bytes of a message that fills a link."""
TURNS = 20
"""Of what the ranks do together: as many on each."""
STORE_BYTES = 64 << 20
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def probe_cluster(cluster: Cluster, folder: Path) -> Cluster:
    """The devices of this machine with what was measured of them, all at work at once.

    Where there is one device its link is its memory. The network is not measured: it is given what
    devices of a node reach, and a person who knows better writes it into the file.

    Args:
        folder: Where the store is measured.
    """
    here = present(cluster)
    found = on_all(_measure, here)
    mean = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
    (name,) = here.model_names
    model = DeviceModel(
        here.memory,
        {precision: mean[precision] for precision in PRECISIONS if precision in mean},
        mean["memory"],
        mean["small_op"],
        measured=True,
    )
    inside = Link(mean["link"], mean["latency"])
    host = Host(inside, inside, _store(folder))
    return replace(here, models={name: model}, hosts=dict.fromkeys(here.nodes, host))


def with_rates(cluster: Cluster) -> Cluster:
    """A job's devices with all that is known of them: of accelerators what their makers say, else
    what a probe of this machine has found, now or earlier."""
    here = present(cluster)
    if (known := with_makers_rates(here)) is not None:
        return known
    kept = kept_probe(here)
    if kept is None:
        with tempfile.TemporaryDirectory() as folder:
            kept = probe_cluster(
                Cluster.of_one_node(here.kind, here.devices_per_node), Path(folder)
            )
        keep(kept)
    (host,) = set(kept.hosts.values())
    return replace(here, models=kept.models, hosts=dict.fromkeys(here.nodes, host))


def with_makers_rates(here: Cluster) -> Cluster | None:
    """A job's devices with what their makers say; None where some are not known."""
    if not here.is_cuda:
        return None
    found = {name: _known_as(name, here.models[name].memory) for name in here.model_names}
    if None in found.values():
        return None
    known = {name: ACCELERATORS[maker] for name, maker in found.items() if maker is not None}
    models = {
        name: replace(model, memory=here.models[name].memory) for name, (model, _) in known.items()
    }
    hosts = {device.node: known[device.model][1] for device in here.devices}
    return replace(here, models=models, hosts=hosts)


def _known_as(name: str, memory: float) -> str | None:
    """Of `ACCELERATORS`, what a driver calls so: `NVIDIA A100-SXM4-80GB`. Another build with the
    same name, such as for PCIe, is not: it is slower."""
    words = re.split(r"[^A-Z0-9]+", name.upper().replace("RTX ", "RTX"))
    if "PCIE" in words:
        return None
    found = [known for known in ACCELERATORS if known.split("-")[0].upper() in words]
    return min(found, key=lambda known: abs(ACCELERATORS[known][0].memory - memory), default=None)


def keep(cluster: Cluster) -> Path | None:
    """Notes a probe for later plans; gives the file, or None where it cannot be written."""
    file = _file(cluster)
    return file if write_cached(file, cluster.to_json()) else None


def kept_probe(cluster: Cluster) -> Cluster | None:
    """What a probe of this machine has found of such devices, if there was one."""
    with contextlib.suppress(OSError, UnicodeDecodeError, ConfigError):
        found = Cluster.from_json(_file(cluster).read_text())
        if found.model_names == cluster.model_names and len(set(found.hosts.values())) == 1:
            return found
    return None


def _file(cluster: Cluster) -> Path:
    number, cores = cluster.devices_per_node, usable_cores()
    name = f"{socket.gethostname()}-{number}x{cluster.kind}-{cores}cores.json"
    return cache_file("clusters", name)


def _measure(rank: int, world: int, kind: str, threads: int) -> dict[str, float]:
    device = make_current(kind, rank)
    if world > 1:
        torch.set_num_threads(threads)
    side = SIDE.get(kind, SIDE_OF_ACCELERATORS)
    names, runs = [], []
    for name, dtype in PRECISIONS.items():
        run = _product(side, dtype, device)
        with contextlib.suppress(RuntimeError):  # the ranks of a machine lack the same kernels
            run()
            names.append(name)
            runs.append(run)
    seconds = timed(runs, device, world)
    found = {name: 2 * side**3 / s for name, s in zip(names, seconds, strict=True)}
    found["memory"] = memory_rate(device, world)
    found["small_op"] = small_op(world)
    if world == 1:
        return found | {"link": found["memory"], "latency": found["small_op"]}
    number = torch.zeros(1, device=device)
    (latency,) = timed([lambda: dist.all_reduce(number)], device, world, TURNS, 0.0)
    return found | {"link": collectives(device, world, MESSAGE)["link"], "latency": latency}


def _product(side: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    x = torch.ones(side, side, dtype=dtype, device=device)
    if dtype != torch.int8:
        return lambda: x @ x
    scales = torch.ones(side, 1, device=device)
    left, right = Rows(x, scales), Rows(x, scales.t())
    return lambda: int8_product(left, right, torch.float32)


def _store(folder: Path) -> Link:
    """What a file in this folder takes to be on the disk."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:

        def seconds(data: bytes) -> float:
            begin = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return time.perf_counter() - begin

        latency = seconds(b"0")
        return Link(STORE_BYTES / seconds(bytes(STORE_BYTES)), latency)
