"""A few seconds of measuring that knows no model: matrix products by precision, memory, messages
between the devices of this machine, its disk."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.planner.machine.device_catalog import add_device_memory
from hybridrl.planner.machine.device_probe import (
    collectives,
    mean_of_all,
    measure_memory_rate,
    measure_small_op,
)
from hybridrl.quantization.int8_products import int8_matmul_once
from hybridrl.quantization.rounded_matrix import Rows
from hybridrl.system.cluster_spec import ClusterSpec, DeviceSpec, LinkSpec, NodeSpec
from hybridrl.system.timing import measure_seconds

_MATRIX_SIDE = {"cpu": 256}
_ACCELERATOR_MATRIX_SIDE = 4096
"""Of the matrices that are multiplied."""
_LINK_MESSAGE_BYTES = 32 << 20
"""Bytes of a message that fills a link."""
_COLLECTIVE_TURNS = 20
"""Of what the ranks do together: as many on each."""
FEW_ROWS = 8
"""Of a matrix that is multiplied as in generation, in float32."""
_STORE_BYTES = 64 << 20
_PROBED_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def probe_cluster(cluster: ClusterSpec, folder: Path) -> ClusterSpec:
    """Measure the devices of this machine, all at once, and return their cluster with the measured
    rates.

    Where there is one device its link is its memory. The network is not measured: it is given what
    devices of a node reach, and a person who knows better writes it into the file.

    Args:
        folder: Where the store is measured.
    """
    here = add_device_memory(cluster)
    mean = mean_of_all(_measure, here)
    (name,) = here.model_names
    model = DeviceSpec(
        here.memory,
        {precision: mean[precision] for precision in _PROBED_PRECISIONS if precision in mean},
        mean["memory"],
        mean["small_op"],
        measured=True,
        few_rows=mean["few_rows"],
        date=time.time(),
    )
    inside = LinkSpec(mean["link"], mean["latency"])
    host = NodeSpec(inside, inside, _store(folder))
    return replace(here, models={name: model}, hosts=dict.fromkeys(here.nodes, host))


def _measure(device: torch.device, world: int) -> dict[str, float]:
    side = _MATRIX_SIDE.get(device.type, _ACCELERATOR_MATRIX_SIDE)
    runs: dict[str, Callable[[], object]] = {}
    for name, dtype in _PROBED_PRECISIONS.items():
        run = _product(side, dtype, device)
        with contextlib.suppress(RuntimeError):  # the ranks of a machine lack the same kernels
            run()
            runs[name] = run
    few = torch.ones(FEW_ROWS, side, device=device)
    square = torch.ones(side, side, device=device)
    *seconds, few_s = measure_seconds([*runs.values(), lambda: few @ square], device, world=world)
    found = {name: 2 * side**3 / s for name, s in zip(runs, seconds, strict=True)}
    found["few_rows"] = 2 * FEW_ROWS * side**2 / few_s
    found["memory"] = measure_memory_rate(device, world)
    found["small_op"] = measure_small_op(world)
    if world == 1:
        return found | {"link": found["memory"], "latency": found["small_op"]}
    number = torch.zeros(1, device=device)
    reduce = [lambda: dist.all_reduce(number)]
    (latency,) = measure_seconds(reduce, device, world=world, turns=_COLLECTIVE_TURNS, least=0.0)
    return found | {
        "link": collectives(device, world, _LINK_MESSAGE_BYTES)["link"],
        "latency": latency,
    }


def _product(side: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    x = torch.ones(side, side, dtype=dtype, device=device)
    if dtype != torch.int8:
        return lambda: x @ x
    scales = torch.ones(side, 1, device=device)
    left, right = Rows(x, scales), Rows(x, scales.t())
    return lambda: int8_matmul_once(left, right, torch.float32)


def _store(folder: Path) -> LinkSpec:
    """Measure the rate and latency of writing a file in this folder, until it is on the disk."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:

        def seconds(data: bytes) -> float:
            begin = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return time.perf_counter() - begin

        latency = seconds(b"0")
        return LinkSpec(_STORE_BYTES / seconds(bytes(_STORE_BYTES)), latency)
