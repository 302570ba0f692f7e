"""Tools around training runs; training itself is `python -m hybridrl.main`. See also
`hybridrl COMMAND --help`."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from rich.console import Console

from hybridrl import __version__
from hybridrl.errors import EXIT_CONFIG_ERROR, EXIT_INTERRUPTED, HybridRLError, suggest_name
from hybridrl.system.redaction import redact_output, register_secrets

COMMANDS = {
    "new": (
        "new_command",
        "makes a project: a reward, settings, a Makefile, and a test that passes",
    ),
    "doctor": (
        "doctor_command",
        "looks whether this machine and its packages are fit for jobs, and says what to do",
    ),
    "plan": ("plan_command", "what a job will do and take, before it starts"),
    "checkpoint": (
        "checkpoint_command",
        "lists, verifies, compares, exports and removes checkpoints",
    ),
    "adapt": ("adapt_command", "makes a reward model for an annotator from a few pairs"),
    "cluster": ("cluster_command", "measures devices and links, for plans"),
    "calibrate": ("calibrate", "measures what pieces of work take on this machine, for plans"),
    "report": (
        "report_command",
        "what a run has learned, where its time went, what it said: one page for a browser",
    ),
    "watch": (
        "watch_command",
        "the report of a run as it grows, or the runs of a folder side by side, in a browser",
    ),
    "top": (
        "top_command",
        "a run on this screen: what it learns, what its devices do, what to change",
    ),
    "timeline": (
        "timeline_command",
        "what each device of a run did and waited for, and a trace of it for ui.perfetto.dev",
    ),
    "cache": ("cache_command", "lists what the cache of runs holds, and prunes it"),
    "whatif": ("whatif_command", "how long a step of a run would take if something were different"),
    "completion": (
        "completion",
        "prints a script that completes commands, options, runs and settings in a shell",
    ),
}
"""The module of `hybridrl.commands` and the one-line help of each command. A module has
`add_arguments`, which adds the command's arguments to its parser, and `run`, which takes the parsed
arguments and returns the exit code. Only the module of the requested command is imported, because
others may import torch, which takes seconds and may be broken when `doctor` runs."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and run the chosen command."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    redact_output()
    for word in given:
        register_secrets(word)
    name = next((word for word in given if not word.startswith("-")), "")
    if name and name not in COMMANDS:
        settings = shlex.join(word for word in given[given.index(name) + 1 :] if "=" in word)
        _exit_with_error(
            f"There is no command `{name}`.{suggest_name(name, COMMANDS)} To train: "
            f"{f'python -m hybridrl.main {settings}'.rstrip()}. For the commands: hybridrl --help."
        )
    parser = build_parser([name])
    chosen, words = parser.parse_known_args(given)
    # Settings of a job may stand anywhere among the options, which argparse has no way to say.
    takes_settings = hasattr(chosen, "settings")
    if unknown := [word for word in words if word.startswith("-") or not takes_settings]:
        parser.error(f"unknown: {' '.join(unknown)}. See hybridrl {chosen.command} --help.")
    if takes_settings:
        chosen.settings = words
    try:
        sys.exit(load_command(chosen.command).run(chosen))
    except HybridRLError as error:
        _exit_with_error(str(error))
    except PermissionError as error:
        _exit_with_error(f"{error.filename} may not be read by this user, or written.")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def print_error(sentence: str) -> None:
    """Print the sentence of an error on standard error."""
    console = Console(stderr=True, force_jupyter=False)
    console.print("error:", style="bold red", end=" ")
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def _exit_with_error(sentence: str) -> NoReturn:
    print_error(sentence)
    sys.exit(EXIT_CONFIG_ERROR)


def build_parser(names: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser of the `hybridrl` command line.

    Args:
        names: Subcommands whose own arguments it knows; of the others it has a line each.
    """
    parser = argparse.ArgumentParser(prog="hybridrl", description=__doc__)
    parser.add_argument(
        "--version", action="version", version=f"hybridrl {__version__}", help="print it, and end"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, what) in COMMANDS.items():
        one = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        if name in names:
            load_command(name).add_arguments(one)
    return parser


def load_command(name: str) -> ModuleType:
    """Import the module of `hybridrl.commands` that implements a command."""
    return importlib.import_module(f"hybridrl.commands.{COMMANDS[name][0]}")


if __name__ == "__main__":
    main()
