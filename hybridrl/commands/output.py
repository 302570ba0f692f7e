"""How commands print what they found."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console


def print_for_people(*what: Any) -> int:
    """Print texts and tables for a person; return the exit code 0."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    for each in what:
        console.print(each, highlight=False, markup=False, soft_wrap=isinstance(each, str))
    return 0


def print_json(found: Mapping[str, Any] | Sequence[Any]) -> int:
    """Print data for a program; return the exit code 0."""
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0
