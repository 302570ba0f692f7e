"""`hybridrl doctor`: check this machine and its packages for what would keep jobs from training."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from rich.text import Text

from hybridrl.commands.output import print_for_people, print_json
from hybridrl.doctor.check_runner import list_checks, run_doctor_checks
from hybridrl.doctor.finding import DoctorFinding, FindingState
from hybridrl.errors import EXIT_FAILURE, ConfigError
from hybridrl.system.formatting import format_seconds

_DEFAULT_SECONDS = 9.0
_RESERVED_SECONDS = 1.0
"""Of the time, for what is done after imports have ended."""
_STATE_COLORS = {
    FindingState.OK: "green",
    FindingState.NOTE: "yellow",
    FindingState.PROBLEM: "bold red",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Looks at versions, imports, devices, memory, limits, disk and network. Exit "
        "code 1 if something would keep jobs from training."
    )
    parser.add_argument(
        "--runs", default="runs", metavar="FOLDER", help="the folder that runs are made in (runs)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=_DEFAULT_SECONDS,
        help=f"the most that it takes ({_DEFAULT_SECONDS:g})",
    )
    parser.add_argument("--json", action="store_true", help="as data")


def run(chosen: argparse.Namespace) -> int:
    """Run all checks and print their findings; return 1 if there is a problem.

    Raises:
        ConfigError: for a time in which nothing could be looked at.
    """
    if not _RESERVED_SECONDS < chosen.seconds <= 3600:
        raise ConfigError(
            f"--seconds {chosen.seconds:g}: must be above {_RESERVED_SECONDS:g}, 3600 at most."
        )
    began = time.monotonic()
    checks = list_checks(Path(chosen.runs).expanduser(), chosen.seconds - _RESERVED_SECONDS)
    found = run_doctor_checks(checks, chosen.seconds)
    seconds = time.monotonic() - began
    count = Counter(finding.state for finding in found)
    if chosen.json:
        print_json(
            {
                "findings": [finding._asdict() for finding in found],
                "problems": count[FindingState.PROBLEM],
                "notes": count[FindingState.NOTE],
                "seconds": seconds,
            }
        )
    else:
        print_for_people(*map(_format_finding, found), "", _summarize_findings(count, seconds))
    return EXIT_FAILURE if count[FindingState.PROBLEM] else 0


def _format_finding(finding: DoctorFinding) -> Text:
    line = Text.assemble(
        (f"{finding.state:<9}", _STATE_COLORS[finding.state]), f"{finding.topic}: {finding.what}"
    )
    if finding.cure:
        line.append(f"\n{'':<9}-> {finding.cure}")
    return line


def _summarize_findings(count: Counter[FindingState], seconds: float) -> str:
    found = [
        f"{number} {state}{'s' * (number != 1)}"
        for state in (FindingState.PROBLEM, FindingState.NOTE)
        if (number := count[state])
    ]
    return f"{', '.join(found) or 'all is well'}, in {format_seconds(seconds)}"
