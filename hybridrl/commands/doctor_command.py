"""`hybridrl doctor`: check this machine and its packages for what would keep jobs from training."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from rich.text import Text

from hybridrl.commands.output import show, show_json
from hybridrl.doctor.check_runner import examine, families
from hybridrl.doctor.finding import Finding, State
from hybridrl.errors import ConfigError
from hybridrl.system.formatting import readable_seconds

FAULTY = 1
"""Exit code where something would keep jobs from training."""
SECONDS = 9.0
SPARE_S = 1.0
"""Of the time, for what is done after imports have ended."""
COLOURS = {State.OK: "green", State.NOTE: "yellow", State.PROBLEM: "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Looks at versions, imports, devices, memory, limits, disk and network. Exit "
        "code 1 if something would keep jobs from training."
    )
    parser.add_argument(
        "--runs", default="runs", metavar="FOLDER", help="the folder that runs are made in (runs)"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"the most that it takes ({SECONDS:g})"
    )
    parser.add_argument("--json", action="store_true", help="as data")


def run(chosen: argparse.Namespace) -> int:
    """Run all checks and print their findings; return 1 if there is a problem.

    Raises:
        ConfigError: for a time in which nothing could be looked at.
    """
    if not SPARE_S < chosen.seconds <= 3600:
        raise ConfigError(f"--seconds {chosen.seconds:g}: must be above {SPARE_S:g}, 3600 at most.")
    began = time.monotonic()
    checks = families(Path(chosen.runs).expanduser(), chosen.seconds - SPARE_S)
    found = examine(checks, chosen.seconds)
    seconds = time.monotonic() - began
    count = Counter(finding.state for finding in found)
    if chosen.json:
        show_json(
            {
                "findings": [finding._asdict() for finding in found],
                "problems": count[State.PROBLEM],
                "notes": count[State.NOTE],
                "seconds": seconds,
            }
        )
    else:
        show(*map(_line, found), "", _summary(count, seconds))
    return FAULTY if count[State.PROBLEM] else 0


def _line(finding: Finding) -> Text:
    line = Text.assemble(
        (f"{finding.state:<9}", COLOURS[finding.state]), f"{finding.topic}: {finding.what}"
    )
    if finding.cure:
        line.append(f"\n{'':<9}-> {finding.cure}")
    return line


def _summary(count: Counter[State], seconds: float) -> str:
    found = [
        f"{number} {state}{'s' * (number != 1)}"
        for state in (State.PROBLEM, State.NOTE)
        if (number := count[state])
    ]
    return f"{', '.join(found) or 'all is well'}, in {readable_seconds(seconds)}"
