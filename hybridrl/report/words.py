"""The first part of a report: what was learned, and what to do next, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridrl.report.advice import advise, what_was_learned


def words(run: Path) -> dict[str, Any]:
    """`learned`, sentences; and `advice`, what matters most first."""
    return {"learned": what_was_learned(run), "advice": [one._asdict() for one in advise(run)]}
