"""Chooses how a run is shown: redrawn on a terminal, line by line everywhere else."""

from __future__ import annotations

import sys

from rich.console import Console

from hybridrl.observe.line_console import LineConsole
from hybridrl.observe.live_console import LiveConsole
from hybridrl.observe.step_view import StepView

__all__ = ["StepView", "make_console"]


def make_console(
    total_steps: int, title: str, console: Console | None = None, accuracy: str = "accuracy"
) -> StepView:
    """A `LiveConsole` if standard output is a terminal that can move its cursor and say Unicode.

    Otherwise a `LineConsole`: a log file, a pipe, a notebook, `TERM=dumb`. The metric `accuracy` is
    shown by the name given.
    """
    if console is None:
        # FORCE_COLOR makes rich take a log file for a terminal; a file cannot be redrawn.
        console = Console(force_terminal=None if sys.stdout.isatty() else False)
    unicode = console.encoding.startswith("utf")
    if console.is_interactive and not console.is_jupyter and unicode:
        return LiveConsole(total_steps, title, console, accuracy=accuracy)
    return LineConsole(total_steps, title, console, accuracy=accuracy)
