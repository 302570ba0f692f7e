"""The choice of console: redrawn on a terminal, line by line everywhere else."""

from __future__ import annotations

import os
import sys

from rich.console import Console

from hybridrl.console.line_console import LineConsole
from hybridrl.console.live_console import LiveConsole
from hybridrl.console.run_view import RunView

_KERNEL_VARIABLES = ("JPY_PARENT_PID", "JPY_SESSION_NAME", "COLAB_RELEASE_TAG")
"""Kernels have one of these, and so do the programs that their cells start (`!python ...`)."""


def make_console(
    total_steps: int, title: str, console: Console | None = None, accuracy: str = "accuracy"
) -> RunView:
    """Return a `LiveConsole` if standard output is a terminal with cursor control and Unicode.

    Otherwise a `LineConsole`: a log file, a pipe, a notebook, `TERM=dumb`. The metric `accuracy` is
    shown by the name given.
    """
    if console is None:
        # FORCE_COLOR makes rich take a log file for a terminal; a file cannot be redrawn.
        is_terminal = sys.stdout.isatty() and not in_notebook()
        console = Console(force_terminal=None if is_terminal else False, force_jupyter=False)
    unicode = console.encoding.startswith("utf")
    if console.is_interactive and not console.is_dumb_terminal and unicode:
        return LiveConsole(total_steps, title, console, accuracy=accuracy)
    return LineConsole(total_steps, title, console, accuracy=accuracy)


def progress_lines() -> RunView:
    """Return a console that shows what a program of one's own waits for: in the cell of a notebook,
    else on standard error, for standard output is the program's."""
    return LineConsole(0, "", Console(stderr=not in_notebook(), force_jupyter=False))


def in_notebook() -> bool:
    """Return whether output ends in a notebook, of this program or of the one that started it.
    There a program may have a terminal, whose cursor movements the notebook shows as they are."""
    return "ipykernel" in sys.modules or any(map(os.environ.get, _KERNEL_VARIABLES))
