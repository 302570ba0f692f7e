"""`hybridrl timeline RUN`: show what each device did and waited for, and write a Perfetto trace."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from hybridrl.commands.output import print_for_people
from hybridrl.errors import ConfigError, DataError
from hybridrl.report.device_spans import (
    IDLE,
    SPAN_COLORS,
    DeviceSpan,
    format_cause,
    read_device_spans,
    sum_idle_by_cause,
)
from hybridrl.report.perfetto_trace import write_perfetto_trace
from hybridrl.system.formatting import format_seconds

_MAX_CAUSES = 3
_MIN_SHOWN_SHARE = 0.005
"""What is less of a device's time is not worth a word."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--steps", type=int, default=10, metavar="N", help="the newest that count (10)"
    )
    parser.add_argument("--out", metavar="FILE", help="where the trace goes (RUN/trace.json)")


def run(chosen: argparse.Namespace) -> int:
    """Write the trace and print the shares of each device's time.

    Raises:
        ConfigError: for a folder without recorded steps.
        StorageError: if the trace cannot be written.
    """
    if chosen.steps < 1:
        raise ConfigError(f"--steps {chosen.steps}: must be 1 or more.")
    folder = Path(chosen.run)
    try:
        spans = read_device_spans(folder, chosen.steps)
    except DataError as error:
        raise ConfigError(str(error)) from error
    file = Path(chosen.out) if chosen.out else folder / "trace.json"
    write_perfetto_trace(spans, file)
    seconds = max(span.end for span in spans) - min(span.start for span in spans)
    steps = len({span.step for span in spans})
    head = f"{steps} steps of {folder}: {format_seconds(seconds)}"
    trace = f"trace: {file} (opens in ui.perfetto.dev)"
    return print_for_people(head, "", _build_share_table(spans), "", trace)


def _build_share_table(spans: Sequence[DeviceSpan]) -> Table:
    """Build a row for each device with the shares of its time by phase."""
    whole: dict[int, float] = defaultdict(float)
    shares: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        whole[span.device] += span.seconds
        shares[span.device][span.phase] += span.seconds
    shown = [
        phase for phase in SPAN_COLORS if phase == IDLE or any(phase in s for s in shares.values())
    ]
    table = Table(title="shares of each device's time", title_justify="left", box=None)
    for column in ("device", *shown, "idle, by cause"):
        table.add_column(column, justify="right" if column in shown else "left")
    for device, causes in sum_idle_by_cause(spans).items():
        cells = [f"{shares[device][phase] / whole[device]:.0%}" for phase in shown]
        said = [
            f"{format_cause(cause)} {share:.0%}"
            for cause, share in list(causes.items())[:_MAX_CAUSES]
            if share > _MIN_SHOWN_SHARE
        ]
        table.add_row(str(device), *cells, ", ".join(said))
    return table
