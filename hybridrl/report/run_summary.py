"""What a run learned and where its time went, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridrl.report.device_spans import in_words
from hybridrl.report.run_evidence import Change, Evidence
from hybridrl.run_files.beside_steps import CHECKPOINT, EVALUATION, KEEPING
from hybridrl.run_files.run_status import FAILED, FINISHED, INTERRUPTED, KILLED, state_of
from hybridrl.system.formatting import readable_seconds

BY_CHANCE = 0.05
"""What chance makes less often than that is told as no chance."""
LEAST_SHARE = 0.02
"""What is less of the time is not worth a word."""
PARTS = 4


def learned(seen: Evidence) -> list[str]:
    """See `what_was_learned`."""
    ended = _end(seen)
    if not seen.rows:
        return ended or ["The run has not done a step yet."]
    return [*ended, *_rewards(seen), *_evaluations(seen), *_time(seen)]


def _end(seen: Evidence) -> list[str]:
    """How a run ended that did not do all of its steps."""
    state, why = state_of(seen.run.path)
    if state == FINISHED and not seen.rows:
        return ["The run is over, and no step of training was done."]
    if state not in (FAILED, INTERRUPTED, KILLED):
        return []
    how = "failed" if state == FAILED else f"was {state}"
    when = f"after step {seen.steps}" if seen.rows else "before its first step was done"
    return [f"The run {how} {when}: {why.removesuffix('.')}." if why else f"The run {how} {when}."]


def _rewards(seen: Evidence) -> list[str]:
    steps = len(seen.rows)
    if reward := seen.change("reward/mean"):
        doubt = seen.reward_doubt()
        moved = abs(reward.last - reward.first)
        how = (
            " (no more than chance)" if moved <= 2 * 2**0.5 * doubt else f" (±{2 * doubt:.2g} each)"
        )
        said = f"In {steps} steps the mean reward went from {_to(reward)}{how if doubt else ''}"
        lengths = seen.change("response/length_mean")
        return [f"{said}; responses from {_to(lengths)} tokens." if lengths else f"{said}."]
    if loss := seen.change("policy/loss"):
        return [f"In {steps} steps the loss went from {_to(loss)}."]
    return [f"The run has done {steps} step{'s' if steps > 1 else ''}."]


def _evaluations(seen: Evidence) -> list[str]:
    """From each set's first evaluation to its last, with 95% intervals."""
    said = []
    for name, first, last in seen.evaluated:
        if last["low"] > first["high"]:
            verdict = "better, beyond chance"
        elif last["high"] < first["low"]:
            verdict = "worse, beyond chance"
        elif (p := _paired(first, last)) is not None and p < BY_CHANCE:
            which = "better" if last["value"] > first["value"] else "worse"
            verdict = f"{which}, compared prompt by prompt (p = {p:.2g})"
        else:
            verdict = "the intervals overlap"
        said.append(
            f"{name.replace('/', ' ')} went from {_within(first)} at step {first['step']} to "
            f"{_within(last)} at step {last['step']}: {verdict}."
        )
    return said


def _paired(first: Mapping[str, Any], last: Mapping[str, Any]) -> float | None:
    """How likely chance alone makes the difference; None if it was not compared with the first."""
    difference = last.get("difference") or {}
    return difference.get("p") if difference.get("baseline") == first["value"] else None


def _time(seen: Evidence) -> list[str]:
    if not seen.spans:
        return []
    shown = _largest({f"{role}.{phase}": share for (role, phase), share in seen.work.items()})
    steps = sorted({span.step for span in seen.spans})
    seconds = max(seen.seconds.values())
    which = f"steps {steps[0]} to {steps[-1]}" if steps[1:] else f"step {steps[0]}"
    said = (
        f"Over {readable_seconds(seconds)} of {which}, on "
        f"{len(seen.devices)} device{'s' if len(seen.devices) > 1 else ''}, the time went to "
        f"{shown}"
    )
    if (idle := sum(seen.waits.values())) >= LEAST_SHARE:
        causes = _largest({in_words(cause): share for cause, share in seen.waits.items()})
        said += f"; devices were idle {idle:.0%} of it ({causes})"
    if sum(seen.beside.values()) >= LEAST_SHARE:
        names = {EVALUATION: "evaluations", CHECKPOINT: "checkpoints", KEEPING: "keeping samples"}
        beside = _largest({names[what]: share for what, share in seen.beside.items()})
        said += f". Between the first of these steps and the last, beside them: {beside}"
    return [f"{said}."]


def _largest(shares: Mapping[str, float]) -> str:
    ranked = sorted(shares.items(), key=lambda one: -one[1])[:PARTS]
    kept = [f"{name} {share:.0%}" for name, share in ranked if share >= LEAST_SHARE]
    return ", ".join(kept or [f"{name} {share:.1%}" for name, share in ranked[:1]])


def _to(change: Change) -> str:
    return f"{change.first:.3g} to {change.last:.3g}"


def _within(figures: Mapping[str, float]) -> str:
    return f"{figures['value']:.3g} ({figures['low']:.3g} to {figures['high']:.3g})"
