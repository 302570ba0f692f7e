"""`hybridrl report RUN`: write a run's report as one HTML file that opens without a network."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from hybridrl.commands.output import print_for_people
from hybridrl.errors import ConfigError
from hybridrl.run_files.run_paths import REPORT
from hybridrl.run_files.run_reader import open_run
from hybridrl.system.formatting import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="RUN",
        help="runs whose curves and settings are shown beside",
    )
    parser.add_argument("--out", metavar="FILE", help=f"else {REPORT} in the run's folder")
    parser.add_argument("--open", action="store_true", help="open it in the browser")


def run(chosen: argparse.Namespace) -> int:
    """Write the page, and open it with `--open`.

    Raises:
        ConfigError: if a folder is no run's, or the file cannot be named so.
        StorageError: if the page cannot be written.
    """
    shown = open_run(Path(chosen.run).expanduser())
    others = [open_run(Path(other).expanduser()) for other in chosen.against]
    # Of `--against runs/*` the run itself is one, and runs/latest another for the second time.
    against = list({other.path: other for other in others if other.path != shown.path}.values())
    out = Path(chosen.out).expanduser() if chosen.out else None
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {chosen.out} is a folder. Name a file in it: {out / REPORT}.")
    # It brings torch, which takes seconds; a wrong folder is refused without it.
    from hybridrl.report.report_content import write_report

    file, size = write_report(shown, against, out)
    print_for_people(f"{file} ({format_bytes(size)})")
    if chosen.open:
        webbrowser.open(file.absolute().as_uri())
    return 0
