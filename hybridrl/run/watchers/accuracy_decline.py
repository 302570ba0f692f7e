"""A warning when evaluations fall below the first one of the run, with the likely cause."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hybridrl.config.schema import Config
from hybridrl.run.watchers.watcher import FinishedEvaluation, Watcher
from hybridrl.run_files.summary import resolve_accuracy_name

_SIGNIFICANT_DEVIATIONS = 3.0
"""A fall of so many standard deviations is no chance."""


def is_significant_drop(before: float, now: float, prompts: int) -> bool:
    """Return whether an accuracy has dropped by more than chance explains."""
    # As if they were other prompts each time: rather too much than too little.
    variance = (before * (1 - before) + now * (1 - now)) / prompts
    return before - now > _SIGNIFICANT_DEVIATIONS * math.sqrt(variance)


class AccuracyDeclineWatcher(Watcher):
    """A watcher that compares each evaluation with the first one of the run; it warns once.

    Args:
        config: Of the job.
        prompts: Held-out ones.
    """

    def __init__(self, config: Config, prompts: int) -> None:
        self._config, self._prompts = config, prompts
        self._told = False

    def on_evaluation(self, evaluation: FinishedEvaluation) -> Iterator[str]:
        """Tell of an accuracy that has fallen since the first."""
        if self._told or evaluation.accuracy is None:
            return
        first, now = evaluation.accuracy
        if not is_significant_drop(first, now, self._prompts):
            return
        self._told = True
        name = resolve_accuracy_name(self._config.reward)
        yield (
            f"step {evaluation.step}: {name} has fallen from {first:.2f} to "
            f"{now:.2f}, more than chance explains with {self._prompts} held-out prompts. "
            f"{self._cause()}"
        )

    def _cause(self) -> str:
        optimizer = self._config.actor.optimizer
        rate = f"actor.optimizer.learning_rate={optimizer.learning_rate:g}"
        if self._config.model.path is not None and not optimizer.warmup_steps:
            return (
                "Most likely the first steps were too large for this model: one whose learning "
                "rate had been annealed is thrown out of the minimum it was led into. Begin from a "
                "model that was trained at a constant rate, or set actor.optimizer.warmup_steps "
                f"and a lower rate than {rate}."
            )
        return (
            f"If `reward/mean` rises meanwhile, what is rewarded is not what is evaluated; if it "
            f"falls, too, {rate} is likely too high, or algorithm.kl_coefficient too low."
        )
