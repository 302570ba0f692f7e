"""Watchers of evaluations: ending a run that is good enough or no longer improves, and warning of
an accuracy that declines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from hybridrl.checkpoint.keep_rule import check_figure, metric_of
from hybridrl.config.schema import Config, EvalStopConfig
from hybridrl.run.watchers.watcher import EndRun, Finding, FinishedEvaluation, Watcher
from hybridrl.run_files.final_sentence import resolve_accuracy_name

_SUMMARY_KEY = "stop"
"""Where the rule keeps what it knows in the summary, which checkpoints bring back."""


class EarlyStopWatcher(Watcher):
    """A watcher that ends the run as `eval.stop` says.

    Args:
        summary: Of the run; what the rule knows is kept in it.
    """

    def __init__(self, settings: EvalStopConfig, summary: dict[str, Any]) -> None:
        self._settings, self._summary = settings, summary

    @property
    def metric(self) -> str | None:
        """The name of the watched metric; None: no metric ends the run."""
        return None if self._settings.metric is None else metric_of(self._settings.metric)

    def on_resume(self, step: int) -> Sequence[Finding]:
        """End a run for what was evaluated before.

        Raises:
            EndRun: if it is good enough.
        """
        if verdict := self.verdict():
            raise EndRun(verdict)
        return ()

    def on_evaluation(self, evaluation: FinishedEvaluation) -> Sequence[Finding]:
        """Take note of an evaluation of the set that gives the figure.

        Raises:
            ConfigError: if it does not give it.
            EndRun: if the run is to end.
        """
        metric, step = self._settings.metric, evaluation.step
        if metric is None or not evaluation.covers(metric_of(metric)):
            return ()
        check_figure("eval.stop.metric", metric, evaluation.figures)
        value = evaluation.figures[metric_of(metric)]
        known, goodness = self._known, self._goodness
        if (
            known is None
            or math.isnan(known["best"])
            or goodness(value) > goodness(known["best"]) + self._settings.least
        ):
            known = {"best": value, "best_step": step, "waited": 0}
        else:
            known = {**known, "waited": known["waited"] + 1}
        self._summary[_SUMMARY_KEY] = {"metric": metric, **known, "last": value, "last_step": step}
        return self.on_resume(step)

    def verdict(self) -> str:
        """Return why the run has to end, as a sentence without its full stop; empty: it goes on."""
        known, settings = self._known, self._settings
        if known is None:
            return ""
        best, name = known["best"], self.metric
        # The last may be good enough, and no better than the best by `eval.stop.least`.
        for value, step in ((best, known["best_step"]), (known["last"], known["last_step"])):
            target = settings.target
            if target is not None and self._goodness(value) >= self._goodness(target):
                return (
                    f"{name} is {value:.4g}, as good as eval.stop.target={target:g} asks, "
                    f"since step {step}"
                )
        if settings.patience is not None and known["waited"] >= settings.patience:
            return (
                f"{name} was best at step {known['best_step']} ({best:.4g}) and has not become "
                f"better in {known['waited']} evaluations (eval.stop.patience={settings.patience})"
            )
        return ""

    @property
    def _known(self) -> dict[str, Any] | None:
        """The record of earlier evaluations; None before the first, or if it is of another
        metric."""
        known = self._summary.get(_SUMMARY_KEY)
        return known if known and known["metric"] == self._settings.metric else None

    def _goodness(self, value: float) -> float:
        is_reversed = self._settings.metric is not None and self._settings.metric.startswith("-")
        return -value if is_reversed else value


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
