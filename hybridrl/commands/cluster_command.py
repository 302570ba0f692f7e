"""`hybridrl cluster probe`: measure this machine's devices and links for the planner."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.table import Table

from hybridrl.commands.output import print_for_people
from hybridrl.commands.plan_options import add_device_options, devices_here
from hybridrl.errors import ConfigError
from hybridrl.system.cluster_spec import ClusterSpec

SECONDS_TO_MS, _GIGA = 1e3, 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    what = "measures this machine for a few seconds: products by precision, memory, links, disk"
    probe = actions.add_parser("probe", help=what, description=f"M{what[1:]}.")
    add_device_options(probe)
    probe.add_argument(
        "--store", default=".", metavar="FOLDER", help="a folder on the disk of checkpoints (here)"
    )
    probe.add_argument("--json", action="store_true", help="as data, which `plan --devices` takes")


def run(chosen: argparse.Namespace) -> int:
    """Measure the devices, store the result, and print it.

    Raises:
        ConfigError: if there are no such devices, or no such folder.
    """
    folder = Path(chosen.store).expanduser()
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--store {chosen.store}: name a folder that you can write to.")
    from hybridrl.planner.machine.cluster_rates import measure_cluster

    found, file = measure_cluster(devices_here(chosen.devices, chosen.number), folder)
    if chosen.json:
        sys.stdout.write(found.to_json() + "\n")
        return 0
    where = f"kept in {file}" if file else "not kept: the cache folder cannot be written"
    return print_for_people(_build_speed_table(found), where)


def _build_speed_table(cluster: ClusterSpec) -> Table:
    (name,) = cluster.model_names
    model, host = cluster.models[name], cluster.hosts[cluster.nodes[0]]
    table = Table(title=str(cluster), title_justify="left", box=None, pad_edge=False)
    for column, side in (("of a device", "left"), ("", "right"), ("", "left")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for precision, flops in model.flops.items():
        table.add_row(f"products, {precision}", f"{flops / _GIGA:,.1f}", "GFLOP/s")
    table.add_row("memory, read and written", f"{model.bandwidth / _GIGA:,.1f}", "GB/s")
    table.add_row("a small operation", f"{model.small_op * 1e6:,.1f}", "microseconds")
    table.add_row("from another device", f"{host.inside.bandwidth / _GIGA:,.2f}", "GB/s")
    table.add_row("until it begins", f"{host.inside.latency * SECONDS_TO_MS:,.3f}", "ms")
    if host.store is not None:
        table.add_row("to the disk", f"{host.store.bandwidth / _GIGA:,.2f}", "GB/s")
        table.add_row("until it begins", f"{host.store.latency * SECONDS_TO_MS:,.3f}", "ms")
    return table
