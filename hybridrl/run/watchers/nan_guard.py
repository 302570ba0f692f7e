"""Detecting steps with non-finite numbers, and what the run does about them: skip, rewind or stop.

It looks at what every program gives the loop: the metrics of its updates, the records of its calls,
and its samples.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hybridrl.batch.arrow_columns import RaggedColumn
from hybridrl.batch.batch import Batch
from hybridrl.batch.call_record import IN_WEIGHT
from hybridrl.config.schema import GuardConfig
from hybridrl.errors import TrainingError
from hybridrl.run.watchers.watcher import Finding, FinishedStep, RewindRequest, Watcher
from hybridrl.run_files.run_directory import RunDirectory

_SKIPPED_SUFFIX = "skipped_updates"
"""How the metric of an update that was left out ends, whatever role it is of."""
_FINITE_SUFFIXES = ("loss", "grad_norm", "reward/mean", "cost/mean")
"""How the names of metrics end that must be finite."""
_STEP_COLUMNS = (
    *("rollout_log_probs", "scores", "costs", "ref_log_probs", "log_probs", "values"),
    *("cost_values", "advantages", "returns", "cost_returns"),
)
"""In the order in which a step makes them."""
_NAN_MEANS_DROPPED = ("scores", "costs")
"""Columns in which NaN is a sample that was left out on purpose."""
_MAX_KEPT_STEPS = 20
"""So many steps are kept for inspection, the first ones of the run."""


@dataclass(frozen=True)
class NonFiniteStep:
    """A step with numbers that are not finite.

    Attributes:
        number: Of the step.
        metrics: The names of such metrics.
        skipped: Updates that were left out.
        where: Role, rank and what it saw first; empty: nobody has said.
        in_weights: It was a weight: no later update can be another.
        column: The first column of its samples that has such a number; empty: none.
        rows: Which have one there.
    """

    number: int
    metrics: list[str]
    skipped: int
    where: str = ""
    in_weights: bool = False
    column: str = ""
    rows: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        said = f"step {self.number}: not finite: {', '.join(self.metrics) or 'a gradient'}"
        if self.where:
            said += f"; first seen by {self.where}"
        if self.column:
            some = f"rows {' '.join(map(str, self.rows[:5]))}{' ...' if self.rows[5:] else ''}"
            said += f"; among the samples in `{self.column}` of {some}"
        return said + "."


class NanGuard(Watcher):
    """A watcher for non-finite numbers in the metrics, call records and samples of steps.

    Args:
        config: What is to be done.
        directory: Where bad steps are kept.

    Attributes:
        unasked: The number of a step that is undone, whatever its numbers are.
    """

    def __init__(self, config: GuardConfig, directory: RunDirectory) -> None:
        self._config, self._directory = config, directory
        self._in_a_row: dict[str, int] = defaultdict(int)
        self._rewinds: Counter[int] = Counter()
        self._made = self._left_out = 0
        self.unasked: int | None = None

    @property
    def rewinds(self) -> bool:
        """True if the run may rewind, so that it needs a checkpoint before its first step."""
        return self._config.on_nan == "rewind"

    def on_step_end(self, step: FinishedStep) -> Iterator[Finding]:
        """Keep what a bad step learned from, tell of it, and do what `guard.on_nan` says.

        Raises:
            TrainingError: if the run is to end.
            Rewind: if it is to go back.
        """
        bad = None if step.number == self.unasked else self.look(step)
        yield {"guard/skipped": float(bad.skipped if bad else 0)}
        if bad is not None:
            yield from self._act(bad, step)

    def look(self, step: FinishedStep) -> NonFiniteStep | None:
        """Return the step, if it is a bad one; count its updates."""
        metrics = step.metrics
        names = [name for name in metrics if name.endswith(_FINITE_SUFFIXES)]
        wrong = sorted(name for name in names if not math.isfinite(metrics[name]))
        skipped = self._count(step.updates)
        if not wrong and not skipped:
            return None
        seen = [
            (fault.order, record.start, record.rank, f"{record.role}", fault.where)
            for record in step.records
            for fault in record.faults
        ]
        where, in_weights = "", False
        if seen:
            order, _, rank, role, what = min(seen)
            where, in_weights = f"{role} rank {rank}, in {what}", order == IN_WEIGHT
        return NonFiniteStep(step.number, wrong, skipped, where, in_weights)

    def _act(self, bad: NonFiniteStep, step: FinishedStep) -> Iterator[str]:
        samples, groups = step.result.batch.collect(), step.groups
        column, rows = find_non_finite_column(samples)
        bad = replace(bad, column=column, rows=rows)
        where = self._keep(bad, samples, step.metrics)
        if self._config.on_nan == "stop":
            raise TrainingError(f"{bad} {where} The run ends, as guard.on_nan=stop says.")
        if self._config.on_nan == "rewind":
            yield f"{bad} {where}"
            if rows and "group_id" in samples:
                groups = samples["group_id"][rows].tolist()
            raise RewindRequest(bad.number, groups)
        if bad.in_weights:
            raise TrainingError(
                f"{bad} {where} No update can mend a weight that is no number: take another model "
                "(model.path), or go on from an earlier checkpoint with a lower learning rate "
                "(actor.optimizer.learning_rate)."
            )
        if (most := max(self._in_a_row.values(), default=0)) >= self._config.most_skipped:
            raise TrainingError(
                f"{bad} {where} Now {most} updates in a row were left out (guard.most_skipped). "
                "Look for what is not finite in these samples, or for a learning rate "
                "(actor.optimizer.learning_rate) that has sent the weights to infinity."
            )
        left_out = "The update was left out. " if bad.skipped else ""
        yield f"{bad} {left_out}{where}"

    def _keep(self, bad: NonFiniteStep, samples: Batch, metrics: Mapping[str, float]) -> str:
        """Save the samples for inspection and return a sentence that names the file."""
        folder = self._directory.path / "bad-steps"
        if len(list(folder.glob("*.parquet"))) >= _MAX_KEPT_STEPS:
            return f"Its samples are not kept: there are {_MAX_KEPT_STEPS} such steps in {folder}."
        found = {**vars(bad), "all_metrics": dict(metrics)}
        path = self._directory.write_bad_step(bad.number, samples.table, found)
        return f"Its samples are in {path}."

    def on_rewind(self, rewind: RewindRequest, step: int) -> Sequence[Finding]:
        """Take note that the run goes back.

        Raises:
            TrainingError: if it has done so too often.
        """
        self._in_a_row.clear()
        self._rewinds[step] += 1
        if self._rewinds[step] > self._config.most_skipped:
            raise TrainingError(
                f"step {rewind.step}: the run has gone back to the checkpoint of step {step} "
                f"{self._config.most_skipped} times (guard.most_skipped), and the numbers were not "
                "finite again with other prompts. So it is not the prompts: try a lower learning "
                "rate (actor.optimizer.learning_rate), or go on from an earlier checkpoint."
            )
        return ()

    def on_run_end(self) -> Sequence[Finding]:
        """Refuse a run that learned nothing.

        Raises:
            TrainingError: if every update of the run was left out.
        """
        if self._left_out and not self._made:
            raise TrainingError(
                f"All {self._left_out} updates of this run were left out, because their numbers "
                "were not finite: nothing was learned. What each step learned from is in "
                f"{self._directory.path / 'bad-steps'}."
            )
        return ()

    def state(self) -> dict[str, Any]:
        """The counts of a run, as plain data."""
        rewinds = {str(step): number for step, number in self._rewinds.items()}
        counts = {"made": self._made, "left_out": self._left_out}
        return {**counts, "in_a_row": dict(self._in_a_row), "rewinds": rewinds}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from the counts of a run that ended; those of one that goes back go on as they
        are, or it could go back for ever."""
        if self._made or self._left_out or self._rewinds:
            return
        self._made, self._left_out = state["made"], state["left_out"]
        self._in_a_row |= state["in_a_row"]
        self._rewinds.update({int(step): number for step, number in state["rewinds"].items()})

    def _count(self, updates: Sequence[Mapping[str, float]]) -> int:
        """Return the number of skipped updates of the step, and count consecutive ones by role."""
        skipped = 0
        for update in updates:
            for name, value in update.items():
                if name.endswith(_SKIPPED_SUFFIX):
                    skipped += value > 0
                    self._left_out += value > 0
                    self._made += value == 0
                    self._in_a_row[name] = self._in_a_row[name] + 1 if value else 0
        return skipped


def find_non_finite_column(samples: Batch) -> tuple[str, list[int]]:
    """Return the first column, in the order in which a step makes them, with a non-finite number
    under the response mask, and the rows that have one; an empty name and no rows if there is
    none."""
    mask = samples["response_mask"].values.bool() if "response_mask" in samples else None
    for name in (name for name in _STEP_COLUMNS if name in samples):
        values = samples[name]
        numbers = values.values if isinstance(values, RaggedColumn) else values
        if not isinstance(numbers, torch.Tensor):
            continue
        wrong = torch.isinf(numbers) if name in _NAN_MEANS_DROPPED else ~torch.isfinite(numbers)
        if isinstance(values, RaggedColumn):
            if mask is not None and len(mask) == len(wrong):
                wrong = wrong & mask
            place = torch.searchsorted(values.cu_seqlens, wrong.nonzero()[:, 0], right=True) - 1
        else:
            place = wrong.nonzero()[:, 0]
        if len(place):
            return name, sorted(set(place.tolist()))
    return "", []
