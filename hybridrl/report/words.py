"""The first part of a report: what was learned, and what to do next, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridrl.report.advice import advise_of
from hybridrl.report.evidence import Evidence
from hybridrl.report.learned import learned


def words(run: Path) -> dict[str, Any]:
    """`learned`, sentences; and `advice`, what matters most first; None: no step says anything."""
    seen = Evidence(run)
    found = [one._asdict() for one in advise_of(seen)] if seen.rows else None
    return {"learned": learned(seen), "advice": found}
