"""The first part of a report: what was learned, and what to do next, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hybridrl.report.run_advice import advise_of
from hybridrl.report.run_evidence import Evidence
from hybridrl.report.run_summary import learned
from hybridrl.run_files.evaluation_log import newest_of_sets
from hybridrl.run_files.run_reader import RunReader

BETTER_BY = {"accuracy": 1, "pair_accuracy": 1, "loss": -1}
"""Metrics that say which of two models is better, and the sign of a gain."""
TWO_SIDED_95 = 1.96


def words(run: RunReader, against: Sequence[RunReader] = ()) -> dict[str, Any]:
    """`learned`, sentences, with those on runs beside it; and `advice`, what matters most first;
    None: no step says anything."""
    seen = Evidence(run)
    found = [one._asdict() for one in advise_of(seen)] if seen.rows else None
    return {"learned": [*learned(seen), *compared(run, against)], "advice": found}


def compared(run: RunReader, against: Sequence[RunReader]) -> list[str]:
    """Which of two runs is better by the newest evaluations that both have, and whether chance
    explains the difference: each run's own interval counts, as if the prompts were not the same."""
    mine, sentences = newest_of_sets(run.evaluations()), []
    for other in against:
        theirs = newest_of_sets(other.evaluations())
        found = [
            sentence
            for name in mine.keys() & theirs.keys()
            for metric, sign in BETTER_BY.items()
            if (sentence := _better((run, mine[name]), (other, theirs[name]), name, metric, sign))
        ]
        nothing = f"{run.name} and {other.name} have no evaluation of the same set."
        sentences += sorted(found) or [nothing]
    return sentences


def _better(
    one: tuple[RunReader, Any], two: tuple[RunReader, Any], name: str, metric: str, sign: int
) -> str:
    """Such as: held_out/accuracy: a 0.72 (step 40), b 0.61 (step 60): a is better by 0.11, which
    chance does not explain (95%: 0.02 to 0.20). Empty where one of them has no such metric."""
    figures = [found["metrics"].get(metric, {}) for _, found in (one, two)]
    values = [figure.get("value") for figure in figures]
    if None in values:
        return ""
    shown = ", ".join(
        f"{run.name} {value:.3g} (step {found['step']})"
        for (run, found), value in zip((one, two), values, strict=True)
    )
    gain = sign * (values[0] - values[1])
    better = (one if gain > 0 else two)[0].name
    errors = [_standard_error(figure) for figure in figures]
    if None in errors:
        said = f"{better} is better by {abs(gain):.3g}; how sure that is is unknown" if gain else ""
        return f"{name}/{metric}: {shown}: {said or 'no difference'}."
    doubt = TWO_SIDED_95 * math.hypot(*errors)
    if abs(gain) <= doubt:
        said = f"neither is better by more than chance explains (95%: ±{doubt:.2g})"
    else:
        said = (
            f"{better} is better by {abs(gain):.3g}, which chance does not explain (95%: "
            f"{abs(gain) - doubt:.2g} to {abs(gain) + doubt:.2g})"
        )
    return f"{name}/{metric}: {shown}: {said}."


def _standard_error(figure: dict[str, Any]) -> float | None:
    """By the interval where there is one: that of a share of 0 or 1 is not 0."""
    low, high = figure.get("low"), figure.get("high")
    if low is None or high is None:
        found = figure.get("standard_error")
        return None if found is None else float(found)
    return float((high - low) / (2 * TWO_SIDED_95))
