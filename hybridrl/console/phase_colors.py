"""Where the time of a step went: generating, scoring, training, syncing weights, or other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from hybridrl.batch.call_record import Record

PHASES = ("generate", "score", "train", "sync", "other")

# One colour per phase, in the console and in the curves.
PHASE_COLOURS = {
    "generate": "#4c8ed9",
    "score": "#e8b13a",
    "train": "#e0653f",
    "sync": "#45ada0",
    "other": "#8c8c96",
}


def phase_shares(records: Iterable[Record], wall_seconds: float) -> dict[str, float]:
    """Seconds and shares of a step's wall time by phase, from the records of its calls.

    Args:
        records: one per call and rank.
        wall_seconds: how long the step took for the driver.

    Returns:
        `time/<phase>` in seconds and `share/<phase>` of `wall_seconds`, for each of `PHASES`. A
        role counts with the mean over its ranks, and roles add up: where roles take turns on the
        same devices the shares sum to 1, `other` being what no phase covers. Roles that work side
        by side can sum to more; `other` is then 0.
    """
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    ranks: dict[str, set[int]] = defaultdict(set)
    for record in records:
        ranks[record.role].add(record.rank)
        for phase, duration in record.phases.items():
            seconds[record.role][phase] += duration
    totals = {
        phase: sum(seconds[role].get(phase, 0.0) / len(ranks[role]) for role in seconds)
        for phase in PHASES[:-1]
    }
    totals["other"] = max(0.0, wall_seconds - sum(totals.values()))
    times = {f"time/{phase}": total for phase, total in totals.items()}
    shares = {
        f"share/{phase}": total / wall_seconds if wall_seconds > 0 else 0.0
        for phase, total in totals.items()
    }
    return times | shares
