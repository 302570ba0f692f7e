"""Printing of what commands have found, for people and for programs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hybridrl.system.storage import explain_write_errors


def print_for_people(*what: Any, pipe_width: int = 160, stderr: bool = False) -> int:
    """Print texts and tables for a person; return the exit code 0.

    Args:
        pipe_width: Cells of a line of a table where the output is no terminal.
    """
    stream = sys.stderr if stderr else sys.stdout
    console = Console(width=None if stream.isatty() else pipe_width, stderr=stderr)
    for each in what:
        console.print(each, highlight=False, markup=False, soft_wrap=isinstance(each, str))
    return 0


def print_json(found: Mapping[str, Any] | Sequence[Any]) -> int:
    """Print data for a program; return the exit code 0."""
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0


def fill_template(template: str, words: Mapping[str, str]) -> str:
    """Replace the `@NAME@` placeholders of a template."""
    for name, word in words.items():
        template = template.replace(f"@{name}@", word)
    return template


def print_plan(chosen: argparse.Namespace, plan: str, *what: Any) -> None:
    """Write the text of a plan to `--out`, and print it: as it is with `--json`, else as tables and
    sentences.

    Raises:
        StorageError: if the file cannot be written.
    """
    if chosen.out:
        file = Path(chosen.out).expanduser()
        with explain_write_errors(file):
            file.write_text(plan + "\n")
    if chosen.json:
        sys.stdout.write(plan + "\n")
    else:
        print_for_people(*what)
