"""`hybridrl calibrate`: measures what pieces of work take on this machine, for plans."""

from __future__ import annotations

import argparse
import sys

from hybridrl.commands.steps import show
from hybridrl.errors import ConfigError, HybridRLError
from hybridrl.system.cluster_spec import Cluster, choose_devices
from hybridrl.system.cpu_cores import usable_cores

FEW, MANY = 50, 160
"""Samples of a device where tables of others are there, and where there are none."""
AUTO = "auto"
LEAST = {True: 30, False: 100}
"""Samples, by whether others are there: a network that has seen fewer tells anything."""
MOST_OFF = 0.5
"""As a share: a table that tells its own samples no better would make plans worse."""
TRIED = 0.2
"""Of the samples, those that are held back to say how well the others tell them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `calibrate` takes."""
    parser.description = "Measures layers, heads, generation, updates and gathers here, for plans."
    parser.add_argument(
        "--devices", default="auto", metavar="KIND", help="auto, cpu or cuda (auto)"
    )
    parser.add_argument(
        "--number", type=int, metavar="N", help="how many devices; else every GPU, or two CPU slots"
    )
    parser.add_argument(
        "--dtype", default="auto", help="of computation: auto, float32 or bfloat16 (auto)"
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help=f"how many are measured, for the rest ({MANY}; {FEW} if other devices are known)",
    )
    parser.add_argument("--json", action="store_true", help="as data")


def run(chosen: argparse.Namespace) -> int:
    """Measures and keeps.

    Raises:
        ConfigError: for devices that are not here, or too few samples.
        HybridRLError: if what was measured tells nothing.
    """
    import json

    import numpy as np
    import torch

    from hybridrl.planner.machine.device_catalog import present
    from hybridrl.planner.step.operator_work import Table
    from hybridrl.systems.operator_costs.calibration import calibrate
    from hybridrl.systems.operator_costs.cost_model import OperatorCosts
    from hybridrl.systems.operator_costs.cost_store import keep_table, other_tables

    if chosen.devices not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--devices {chosen.devices}: must be auto, cpu or cuda.")
    if chosen.dtype not in (AUTO, "float32", "bfloat16"):
        raise ConfigError(f"--dtype {chosen.dtype}: must be auto, float32 or bfloat16.")
    gpus, cpus = torch.accelerator.device_count(), usable_cores()
    asked = choose_devices(chosen.devices, chosen.number, gpus, cpus)
    cluster = present(Cluster.of_one_node(*asked))
    dtype = chosen.dtype
    if dtype == AUTO:  # as jobs take it, but for large models on CPUs that multiply bfloat16
        dtype = "bfloat16" if cluster.is_cuda else "float32"
    others = other_tables(cluster, dtype)
    least = LEAST[bool(others)]
    if chosen.samples is not None and chosen.samples < least:
        raise ConfigError(
            f"--samples {chosen.samples}: must be {least} or more, with {len(others)} other tables."
        )
    table = calibrate(cluster, dtype, limit=chosen.samples or (FEW if others else MANY))
    number = len(table.samples)
    held = range(0, number, round(1 / TRIED))
    rest = [sample for n, sample in enumerate(table.samples) if n not in held]
    costs = OperatorCosts([Table(table.device, rest), *others])
    tried = [table.samples[n] for n in held]
    said = costs.seconds([sample.work for sample in tried], table.device)
    off = np.abs(said / np.array([sample.seconds for sample in tried]) - 1).mean()
    if off > MOST_OFF:
        raise HybridRLError(
            f"The samples tell each other only within {off:.0%}, so they are not kept. This "
            "machine was busy with other things, or takes more --samples."
        )
    file = keep_table(cluster, dtype, table)
    if chosen.json:
        sys.stdout.write(json.dumps(table.to_data()) + "\n")
        return 0
    return show(
        f"{cluster}: {number} pieces of work measured, {len(others)} other tables known",
        f"{len(tried)} of them, told by the others, are off by {off:.0%} in the mean",
        f"kept in {file}, for jobs that compute in {dtype}"
        if file
        else "not kept: the cache folder cannot be written",
    )
