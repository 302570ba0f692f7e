"""The rule by which checkpoints are kept or pruned, for runs and for `hybridrl checkpoint prune`.
`CheckpointStore.prune` removes the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hybridrl.errors import ConfigError, suggest_name


@dataclass(frozen=True)
class KeepRule:
    """A retention rule, as `checkpoint.keep_last`, `keep_every` and `best` describe it.

    Attributes:
        last: So many of the newest stay, at least 1.
        every: Steps that are multiples of it stay; 0: none for that reason.
        best: The evaluated figure by which the best step stays, `-` before it where less is better;
            None: none for that reason.
    """

    last: int = 2
    every: int = 0
    best: str | None = None

    def kept(self, steps: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Return the steps to keep.

        Args:
            steps: What was evaluated after each.
        """
        kept = set(sorted(steps)[-max(1, self.last) :])
        if self.every:
            kept |= {step for step in steps if step % self.every == 0}
        best = self.best_of(steps)
        return kept if best is None else kept | {best}

    def best_of(self, steps: Mapping[int, Mapping[str, float]]) -> int | None:
        """Return the step with the best metric, the earliest of equals; None if no step has it."""
        if self.best is None:
            return None
        goodness = {step: self.goodness(figures) for step, figures in steps.items()}
        step = max(sorted(goodness), key=goodness.__getitem__, default=None)
        return None if step is None or goodness[step] == -math.inf else step

    def goodness(self, figures: Mapping[str, float]) -> float:
        """Return the metric as a number of which more is better; minus infinity for steps without
        it."""
        value = figures.get(metric_of(self.best), math.nan) if self.best else math.nan
        value = -value if self.best and self.best.startswith("-") else value
        return value if math.isfinite(value) else -math.inf


def metric_of(best: str) -> str:
    """Return the name of the metric, without the `-` that says that less is better."""
    return best.removeprefix("-")


def check_figure(setting: str, named: str, figures: Mapping[str, float]) -> None:
    """Refuse the name of a metric that no evaluation of this run produces.

    Args:
        setting: That names it.
        named: Its value, `-` before the name where less is better.
        figures: Of an evaluation of this run.

    Raises:
        ConfigError: names those that there are.
    """
    name = metric_of(named)
    if name in figures:
        return
    if not figures:
        raise ConfigError(
            f"{setting}={named}: this run evaluates nothing, so no step is the best. Leave "
            f"{setting} out, or give held-out data (data.eval_path)."
        )
    raise ConfigError(
        f"{setting}={named}: no evaluation of this run gives `{name}`; there are "
        f"{', '.join(sorted(figures))}.{suggest_name(name, figures)}"
    )
