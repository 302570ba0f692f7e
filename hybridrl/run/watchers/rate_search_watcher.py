"""Carries out the search of the learning rate (`actor.optimizer.schedule=auto`): sets rates, and
brings models and data back to the start of a stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hybridrl.algorithms.rate_search import RateSearch, SearchMove
from hybridrl.run.watchers.nan_guard import NanGuard
from hybridrl.run.watchers.watcher import Finding, FinishedStep, Watcher
from hybridrl.run_files.recorded_steps import DRIVER_EVALUATION

if TYPE_CHECKING:
    from hybridrl.job.job import Job
    from hybridrl.trainers.trainer import Trainer


class RateSearchWatcher(Watcher):
    """A watcher that gives each step the learning rate that the search asks for. It is asked before
    the guard, which does not look at steps that are undone.

    Args:
        job: Its groups and its data.
        trainer: Its driver program.
        guard: Of the run.

    Attributes:
        undone: The number of the last step of which nothing stays.
    """

    undone = 0

    def __init__(self, job: Job, trainer: Trainer, guard: NanGuard) -> None:
        self._job, self._trainer, self._guard = job, trainer, guard
        self._groups = [job.groups[role] for role, spec in job.roles.items() if spec.trains]
        self._search: RateSearch | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._feed_state: dict[str, Any] = {}  # at the start of the stage
        self._first = 0

    def on_resume(self, step: int) -> Iterator[Finding]:
        """Begin the search, or go on with that of a checkpoint."""
        loaded, optimizer = self._loaded, self._job.config.actor.optimizer
        self._first = step if loaded is None else loaded["first"]
        lowest, highest = optimizer.learning_rate_range
        search = self._search = RateSearch(
            *(lowest, highest, self._job.config.trainer.steps - self._first),
            *(optimizer.stage_steps, optimizer.trial_rates, optimizer.falling_share),
        )
        if loaded is None:
            self._do(search.begin())
        else:
            self._feed_state, self._loaded = dict(loaded["feed"]), None
            self._do(search.load_state(loaded["search"]))
        return iter(())

    def on_step_end(self, step: FinishedStep) -> Iterator[Finding]:
        """Note the loss of a step, and prepare the workers for the next one."""
        search = self._search
        assert search is not None  # a step comes after `on_resume`
        kind = "trial" if search.is_trial else "stage"
        yield {"search/stage": search.stage, f"search/{kind}_log10_rate": math.log10(search.rate)}
        skipped = any(update.get("skipped_updates") for update in step.updates)
        loss = math.nan if skipped else fmean(update["loss"] for update in step.updates)
        wanted = search.wants_validation and math.isfinite(loss)
        move = search.observe(loss, self._compute_held_out_loss() if wanted else None)
        if kind == "trial" or (move is not None and move.restores):
            self.undone = step.number
            if not math.isfinite(loss):
                self._guard.unasked = step.number
        if move is None:
            return
        self._do(move)
        if kind == "trial":
            if (forecast := search.last_forecast) is not None:
                yield {"search/forecast": forecast}
            if not search.is_trial:
                yield (
                    f"step {step.number}: stage {search.stage} goes on with the learning rate "
                    f"{move.rate:.2g}"
                )
        elif move.restores:
            why = "the loss rose too far" if math.isfinite(loss) else "the loss was not finite"
            yield (
                f"step {step.number}: {why}, so stage {search.stage} starts again "
                f"with the learning rate {move.rate:.2g}"
            )

    def state(self) -> dict[str, Any]:
        """Return the state of the search, as plain data; nothing before its first step."""
        if self._search is None:
            return {}
        return {"search": self._search.state(), "feed": self._feed_state, "first": self._first}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where the watcher that returned `state` stopped."""
        self._loaded = state or None

    def _compute_held_out_loss(self) -> float | None:
        job = self._job
        if job.held_out is None:
            return None
        with job.beside.doing(DRIVER_EVALUATION):
            found = self._trainer.compute_held_out_loss(job.put(job.held_out))
        job.beside.called(job.executor.take_records())
        return found

    def _do(self, move: SearchMove) -> None:
        if move.keeps:
            self._feed_state = self._job.feed.state()
        if move.restores:
            self._job.feed.load_state(self._feed_state)
        for group in self._groups:
            if move.keeps:
                group.keep_snapshot()
            if move.restores:
                group.restore_snapshot()
            group.set_learning_rate(move.rate)
