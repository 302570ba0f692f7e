"""A watcher for samples that could not be scored: it reports failures, and ends a run in which
nothing is left to learn from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridrl.batch.call_record import CallRecord
from hybridrl.batch.turn import EPISODE_FAILURES
from hybridrl.errors import RewardError
from hybridrl.run.watchers.watcher import FinishedEvaluation, FinishedStep, Watcher

_SCORE_KINDS = ("reward", "cost")


class UnscoredSamplesWatcher(Watcher):
    """A watcher for failed scoring: it reports the first failure of each role, and each remark,
    once.

    Args:
        trains: Whether the run learns: then an evaluation may go without scores.
    """

    def __init__(self, trains: bool = True) -> None:
        self._trains = trains
        self._told: set[str] = set()  # roles and remarks

    def on_step_end(self, step: FinishedStep) -> Iterator[str]:
        """Report what failed in a step.

        Raises:
            RewardError: if none of them has a score.
        """
        return self._look(f"step {step.number}", step.records, is_needed=True)

    def on_evaluation(self, evaluation: FinishedEvaluation) -> Iterator[str]:
        """Report what failed in an evaluation; raises as `on_step_end` if nothing else is done."""
        for where, records in evaluation.calls.items():
            yield from self._look(where, records, is_needed=not self._trains)

    def _look(self, where: str, records: Sequence[CallRecord], is_needed: bool) -> Iterator[str]:
        for record in records:
            yield from self._new(record, where)
        for kind in _SCORE_KINDS:
            if why := _none_scored(kind, records):
                if is_needed:
                    raise RewardError(f"{where}: {why.format('nothing is left to learn from')}")
                yield f"{where}: {why.format('its figures say nothing')}"

    def _new(self, record: CallRecord, where: str) -> list[str]:
        remarks = [text for text in dict.fromkeys(record.remarks) if text not in self._told]
        self._told.update(remarks)
        found = [f"{where}: {text}" for text in remarks]
        if not record.notices or record.role in self._told:
            return found
        self._told.add(record.role)
        kind, counted = "reward", "`reward/failures` counts such rows"
        if "episode_turns" in record.metrics:
            kind, counted = "environment", "`environment/<kind>` counts such episodes"
        elif "cost_count" in record.metrics:
            kind, counted = "cost", "`cost/failures` counts such rows"
        return [
            *found,
            f"{where}: {record.notices[0].rstrip()}\nThe run goes on, as {kind}.on_error says; "
            f"{counted}, and this is said once.",
        ]


def _none_scored(kind: str, records: Sequence[CallRecord]) -> str:
    """Return why no sample has a score of this kind, with `{}` for what follows; empty: some
    have, or nothing was scored."""
    scored = sum(record.metrics.get(f"{kind}_count", 0) for record in records)
    dropped = sum(record.metrics.get(f"{kind}_dropped", 0) for record in records)
    if scored or not dropped:
        return ""
    first = next((said for record in records for said in record.notices), "")
    shown = first.replace("{", "{{").replace("}", "}}")
    failed = sum(r.metrics.get(f"episode_{name}", 0) for r in records for name in EPISODE_FAILURES)
    if dropped <= failed:
        return (
            f"none of the {dropped:g} episodes could be played, and all were dropped, as "
            f"environment.on_error=drop says: {{}}. {shown}".rstrip()
        )
    plays = any("episode_turns" in record.metrics for record in records)
    why = (
        f"could be scored, and all were dropped, as {kind}.on_error=drop says"
        if first
        else "has a reward: their episodes returned None and reported none, or a "
        f"function of {kind}.function returned None, which drops a sample"
        if plays
        else f"has a score, because a function of {kind}.function returned None for "
        "each, which drops it"
    )
    return f"none of the {dropped:g} samples {why}: {{}}. {shown}".rstrip()
