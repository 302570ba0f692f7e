"""`hybridrl calibrate`: measure the cost of operators on this machine for the planner."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from hybridrl.commands.output import print_for_people, print_json
from hybridrl.commands.plan_options import add_device_options, devices_here
from hybridrl.errors import ConfigError, HybridRLError, pip_install

_SAMPLES_WITH_OTHER_TABLES, _SAMPLES_WITHOUT_TABLES = 50, 160
"""Samples of a device where tables of others are there, and where there are none."""
_AUTO_DTYPE = "auto"
_MIN_SAMPLES = {True: 30, False: 100}
"""Samples, by whether others are there: a network that has seen fewer tells anything."""
_MAX_RELATIVE_ERROR = 0.5
"""As a share: a table that tells its own samples no better would make plans worse."""
_HELD_OUT_SHARE = 0.2
"""Of the samples, those that are held back to say how well the others tell them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measures layers, heads, generation, updates and gathers here, for plans."
    add_device_options(parser)
    parser.add_argument(
        "--dtype", default="auto", help="of computation: auto, float32 or bfloat16 (auto)"
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help=f"how many are measured, for the rest ({_SAMPLES_WITHOUT_TABLES}; "
        f"{_SAMPLES_WITH_OTHER_TABLES} if other devices are known)",
    )
    parser.add_argument("--json", action="store_true", help="as data")


def run(chosen: argparse.Namespace) -> int:
    """Measure operator costs, check them on held-out samples, and store them.

    Raises:
        ConfigError: for devices that are not here, or too few samples.
        HybridRLError: if what was measured tells nothing.
    """
    if chosen.dtype not in (_AUTO_DTYPE, "float32", "bfloat16"):
        raise ConfigError(f"--dtype {chosen.dtype}: must be auto, float32 or bfloat16.")
    if find_spec("sklearn") is None:
        raise ConfigError(
            "hybridrl calibrate: scikit-learn, which learns from what is measured, is not "
            f"installed: {pip_install('scikit-learn')}"
        )
    # These bring torch, which takes seconds; wrong words are refused without it.
    from hybridrl.planner.machine.cluster_rates import measure_cluster
    from hybridrl.planner.machine.device_catalog import add_device_memory
    from hybridrl.planner.machine.measurements import (
        OPERATORS,
        begin_measurement,
        keep_measurement,
    )
    from hybridrl.systems.operator_costs.calibration import measure_operators
    from hybridrl.systems.operator_costs.cost_model import CostTable, OperatorCostModel
    from hybridrl.systems.operator_costs.cost_source import describe_table, load_other_tables

    cluster = add_device_memory(devices_here(chosen.devices, chosen.number))
    dtype = chosen.dtype
    if dtype == _AUTO_DTYPE:  # as jobs take it, but for large models on CPUs that multiply bfloat16
        dtype = "bfloat16" if cluster.is_cuda else "float32"
    others = load_other_tables(dtype)
    least = _MIN_SAMPLES[bool(others)]
    if chosen.samples is not None and chosen.samples < least:
        raise ConfigError(
            f"--samples {chosen.samples}: must be {least} or more, with {len(others)} other tables."
        )
    measurement = begin_measurement(OPERATORS, describe_table(cluster, dtype))
    probed, _ = measure_cluster(cluster, Path(tempfile.gettempdir()))
    table = measure_operators(
        probed,
        dtype,
        limit=chosen.samples or (_SAMPLES_WITH_OTHER_TABLES if others else _SAMPLES_WITHOUT_TABLES),
    )
    number, profile = len(table.samples), table.device
    every = round(1 / _HELD_OUT_SHARE)
    rest = [sample for n, sample in enumerate(table.samples) if n % every]
    costs = OperatorCostModel([CostTable(profile, rest), *others])
    tried = CostTable(profile, table.samples[::every])
    off = abs(costs.seconds(tried.works, profile) / tried.seconds - 1).mean()
    if off > _MAX_RELATIVE_ERROR:
        raise HybridRLError(
            f"The samples tell each other only within {off:.0%}, so they are not kept. This "
            "machine was busy with other things, or takes more --samples."
        )
    file = keep_measurement(replace(measurement, data=table.to_data()))
    if chosen.json:
        return print_json(table.to_data())
    return print_for_people(
        f"{cluster}: {number} pieces of work measured, {len(others)} other tables known",
        f"{len(tried.samples)} of them, told by the others, are off by {off:.0%} in the mean",
        f"kept in {file}, for jobs that compute in {dtype}"
        if file
        else "not kept: the cache folder cannot be written",
    )
