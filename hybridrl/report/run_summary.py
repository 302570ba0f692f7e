"""Sentences on a run: what it learned, where its time went, whether others are better, and what to
change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hybridrl.report.advice import RunAdvice
from hybridrl.report.device_advice import DEVICE_RULES
from hybridrl.report.device_spans import format_cause
from hybridrl.report.learning_advice import REWARD_RULES, format_interval
from hybridrl.report.run_evidence import MetricChange, RunEvidence
from hybridrl.report.time_advice import TIME_RULES
from hybridrl.run_files.evaluation_log import find_latest_by_set
from hybridrl.run_files.recorded_steps import CHECKPOINT, DRIVER_EVALUATION, DRIVER_RECORDING
from hybridrl.run_files.run_reader import RunReader
from hybridrl.run_files.run_status import FAILED, FINISHED, INTERRUPTED, KILLED, read_run_status
from hybridrl.system.formatting import format_seconds

LOOKS: tuple[Callable[[RunEvidence], Iterator[RunAdvice]], ...] = (
    *REWARD_RULES,
    *TIME_RULES,
    *DEVICE_RULES,
)
"""Everything that is looked for."""
BETTER_BY = {"accuracy": 1, "pair_accuracy": 1, "loss": -1}
"""Metrics that say which of two models is better, and the sign of a gain."""
TWO_SIDED_95 = 1.96
_SIGNIFICANCE_LEVEL = 0.05
"""What chance makes less often than that is told as no chance."""
_MIN_SHOWN_SHARE = 0.02
"""What is less of the time is not worth a word."""
_MAX_LISTED_PARTS = 4


def summarize_learning(seen: RunEvidence) -> list[str]:
    """Return sentences: what the run learned, how sure that is, and where its time went."""
    ended = _describe_end(seen)
    if not seen.rows:
        return ended or ["The run has not done a step yet."]
    return [*ended, *_describe_rewards(seen), *_describe_evaluations(seen), *_describe_time(seen)]


def _describe_end(seen: RunEvidence) -> list[str]:
    """Return a sentence on a run that ended early: its state, its last step and the cause."""
    state, why = read_run_status(seen.run.path)
    if state == FINISHED and not seen.rows:
        return ["The run is over, and no step of training was done."]
    if state not in (FAILED, INTERRUPTED, KILLED):
        return []
    how = "failed" if state == FAILED else f"was {state}"
    when = f"after step {seen.steps}" if seen.rows else "before its first step was done"
    return [f"The run {how} {when}: {why.removesuffix('.')}." if why else f"The run {how} {when}."]


def _describe_rewards(seen: RunEvidence) -> list[str]:
    steps = len(seen.rows)
    if reward := seen.change("reward/mean"):
        doubt = seen.reward_doubt()
        moved = abs(reward.last - reward.first)
        how = (
            " (no more than chance)" if moved <= 2 * 2**0.5 * doubt else f" (±{2 * doubt:.2g} each)"
        )
        change = f"{_format_change(reward)}{how if doubt else ''}"
        said = f"In {steps} steps the mean reward went from {change}"
        lengths = seen.change("response/length_mean")
        return [
            f"{said}; responses from {_format_change(lengths)} tokens." if lengths else f"{said}."
        ]
    if loss := seen.change("policy/loss"):
        return [f"In {steps} steps the loss went from {_format_change(loss)}."]
    return [f"The run has done {steps} step{'s' if steps > 1 else ''}."]


def _describe_evaluations(seen: RunEvidence) -> list[str]:
    """Return a sentence for each evaluation set, comparing first and last results with 95%
    intervals."""
    said = []
    for name, first, last in seen.evaluated:
        if last["low"] > first["high"]:
            verdict = "better, beyond chance"
        elif last["high"] < first["low"]:
            verdict = "worse, beyond chance"
        elif (p := _find_paired_p_value(first, last)) is not None and p < _SIGNIFICANCE_LEVEL:
            which = "better" if last["value"] > first["value"] else "worse"
            verdict = f"{which}, compared prompt by prompt (p = {p:.2g})"
        else:
            verdict = "the intervals overlap"
        said.append(
            f"{name.replace('/', ' ')} went from {format_interval(first)} at step {first['step']} "
            f"to {format_interval(last)} at step {last['step']}: {verdict}."
        )
    return said


def _find_paired_p_value(first: Mapping[str, Any], last: Mapping[str, Any]) -> float | None:
    """Return the p-value against the first evaluation; None if the baseline was another one."""
    difference = last.get("difference") or {}
    return difference.get("p") if difference.get("baseline") == first["value"] else None


def _describe_time(seen: RunEvidence) -> list[str]:
    if not seen.spans:
        return []
    shown = _format_largest_shares(
        {f"{role}.{phase}": share for (role, phase), share in seen.work.items()}
    )
    steps = sorted({span.step for span in seen.spans})
    seconds = max(seen.seconds.values())
    which = f"steps {steps[0]} to {steps[-1]}" if steps[1:] else f"step {steps[0]}"
    said = (
        f"Over {format_seconds(seconds)} of {which}, on "
        f"{len(seen.devices)} device{'s' if len(seen.devices) > 1 else ''}, the time went to "
        f"{shown}"
    )
    if (idle := sum(seen.waits.values())) >= _MIN_SHOWN_SHARE:
        causes = _format_largest_shares(
            {format_cause(cause): share for cause, share in seen.waits.items()}
        )
        said += f"; devices were idle {idle:.0%} of it ({causes})"
    if sum(seen.beside.values()) >= _MIN_SHOWN_SHARE:
        names = {
            DRIVER_EVALUATION: "evaluations",
            CHECKPOINT: "checkpoints",
            DRIVER_RECORDING: "keeping samples",
        }
        beside = _format_largest_shares({names[what]: share for what, share in seen.beside.items()})
        said += f". Between the first of these steps and the last, beside them: {beside}"
    return [f"{said}."]


def _format_largest_shares(shares: Mapping[str, float]) -> str:
    ranked = sorted(shares.items(), key=lambda one: -one[1])[:_MAX_LISTED_PARTS]
    kept = [f"{name} {share:.0%}" for name, share in ranked if share >= _MIN_SHOWN_SHARE]
    return ", ".join(kept or [f"{name} {share:.1%}" for name, share in ranked[:1]])


def _format_change(change: MetricChange) -> str:
    return f"{change.first:.3g} to {change.last:.3g}"


def find_advice(seen: RunEvidence) -> list[RunAdvice]:
    """Return all that there is to advise on a run, what matters most first; nothing on a run that
    is well and has no time to win, nor on one that has not done a step."""
    found = [advice for look in LOOKS for advice in look(seen)]
    return sorted(found, key=lambda advice: -advice.weight)


def words(run: RunReader, against: Sequence[RunReader] = ()) -> dict[str, Any]:
    """`summarize_learning`, sentences, with those on runs beside it; and `advice`, what matters
    most first; None: no step says anything."""
    seen = RunEvidence(run)
    found = [one._asdict() for one in find_advice(seen)] if seen.rows else None
    return {"learned": [*summarize_learning(seen), *compared(run, against)], "advice": found}


def compared(run: RunReader, against: Sequence[RunReader]) -> list[str]:
    """Compare a run with others by the newest evaluations that both have, and say whether chance
    explains the difference: each run's own interval counts, as if the prompts were not the same."""
    mine, sentences = find_latest_by_set(run.evaluations()), []
    for other in against:
        theirs = find_latest_by_set(other.evaluations())
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
    """Return a sentence such as: held_out/accuracy: a 0.72 (step 40), b 0.61 (step 60): a is better
    by 0.11, which chance does not explain (95%: 0.02 to 0.20). Empty where one of them has no such
    metric."""
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
    errors = [error for figure in figures if (error := _standard_error(figure)) is not None]
    if len(errors) < len(figures):
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
    """Return the standard error of a figure, by its interval where there is one: that of a share of
    0 or 1 is not 0."""
    low, high = figure.get("low"), figure.get("high")
    if low is None or high is None:
        found = figure.get("standard_error")
        return None if found is None else float(found)
    return float((high - low) / (2 * TWO_SIDED_95))
