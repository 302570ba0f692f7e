"""`hybridrl top RUN`: show a running job on another terminal until it ends."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from hybridrl.errors import ConfigError
from hybridrl.run_files.run_reader import RunReader
from hybridrl.run_files.run_status import RUNNING, read_run_status

_PIPE_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of a run, such as runs/latest")
    parser.add_argument("--once", action="store_true", help="show it once, also into a pipe")
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="S", help="seconds between two looks (2)"
    )


def run(chosen: argparse.Namespace) -> int:
    """Redraw the screen until the run ends; Ctrl-C closes the screen, not the run.

    Raises:
        ConfigError: if there is no run.
    """
    folder = Path(chosen.run)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder} has no config.yaml, so it is not the folder of a run. Name one, such as "
            "runs/latest."
        )
    if not chosen.every > 0:
        raise ConfigError(f"--every {chosen.every:g}: must be above 0 seconds.")
    # It brings torch, which takes seconds; a wrong folder is refused without it.
    from hybridrl.report.top_screen import render_top_screen

    run_files = RunReader(folder)

    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    width = console.width - 1
    if chosen.once or not sys.stdout.isatty() or read_run_status(folder)[0] != RUNNING:
        console.print(render_top_screen(run_files, width))
        return 0
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(render_top_screen(run_files, width), console=console, auto_refresh=False) as live,
    ):
        while read_run_status(folder)[0] == RUNNING:
            time.sleep(chosen.every)
            live.update(render_top_screen(run_files, console.width - 1), refresh=True)
    return 0
