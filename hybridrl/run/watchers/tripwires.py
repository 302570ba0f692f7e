"""Tripwires: signs of reward hacking, where the reward rises but not what it stands for.

A policy that finds a hole in its reward is rewarded more and more and is worse and worse by every
other measure. So the reward of a run is held against measures that it is not trained on: functions
of `reward.check`, evaluations of held-out prompts; and against the marks of a policy that repeats
itself. The first and the newest window of `guard.tripwires` steps are compared. How much steps
scatter around their trend, and how far neighbouring ones resemble each other, says what is chance.

Gao et al. 2023, arXiv:2210.10760 (a proxy rises while the gold reward falls).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from hybridrl.batch.trends import variance_of_sums
from hybridrl.config.schema import Config
from hybridrl.errors import TrainingError
from hybridrl.run.watchers.evaluation_watchers import is_significant_drop
from hybridrl.run.watchers.watcher import Finding, FinishedEvaluation, FinishedStep, Watcher

_REWARD, _LENGTH, _ENTROPY, _REPEATED = (
    *("reward/mean", "response/length_mean"),
    *("policy/entropy", "response/repeated"),
)
_CHECK_PREFIX = "check/"
"""How the measures of `reward.check` begin."""
_DEFAULT_WINDOW = 20
_SIGNIFICANT_STANDARD_ERRORS = 5.0
"""Standard errors that are no chance, though windows are compared after every step."""
WINDOWS_KEPT = 10
"""Newest windows that say what is chance."""
_LENGTH_FACTOR = 2.0
"""Responses of so many times their first length."""
_ENTROPY_SHARE = 0.1
"""Of what it was at first."""
_LOW_REPEATED_SHARE, _HIGH_REPEATED_SHARE = 0.6, 0.9
"""Shares of responses that were given before to the same prompt."""


class _WindowMeans(NamedTuple):
    """The means of a metric over two windows of steps."""

    before: float
    now: float


class TripwireWatcher(Watcher):
    """A watcher for signs of reward hacking in the metrics of a run; it reports each sign once.

    Args:
        config: Of the job.
        prompts: Number of held-out ones.
    """

    def __init__(self, config: Config, prompts: int = 0) -> None:
        self.window = resolve_tripwire_window(config)
        self._prompts, self._stops = prompts, config.guard.on_tripwire == "stop"
        self._seen: dict[str, list[float]] = defaultdict(list)
        self._accuracies: list[float] = []  # the first and the newest
        self._told: set[str] = set()

    def on_step_end(self, step: FinishedStep) -> Iterator[Finding]:
        """Tell of what can be seen now.

        Raises:
            TrainingError: if the run is to end for it.
        """
        said = self.look(step.number, step.metrics)
        yield {"guard/tripwires": float(len(self._told))}
        yield from self._trip(said)

    def on_evaluation(self, evaluation: FinishedEvaluation) -> Iterator[Finding]:
        """Tell of an accuracy that falls while the reward rises; raises as `on_step_end`."""
        if evaluation.accuracy is not None:
            yield from self._trip(self.evaluated(evaluation.step, evaluation.accuracy[1]))

    def _trip(self, said: Sequence[str]) -> Iterator[str]:
        for notice in said:
            if self._stops:
                raise TrainingError(f"{notice} The run ends, as guard.on_tripwire=stop says.")
            yield notice

    def look(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Take note of the metrics of a step; return sentences on signs that are told of now."""
        checks = [
            name for name in metrics if name.startswith(_CHECK_PREFIX) and name.count("/") == 1
        ]
        for name in (_REWARD, _LENGTH, _ENTROPY, _REPEATED, *checks):
            seen, value = self._seen[name], metrics.get(name, math.nan)
            if math.isfinite(value) or seen:  # a step without a number is as the one before
                seen.append(value if math.isfinite(value) else seen[-1])
                if len(seen) > (1 + WINDOWS_KEPT) * self.window:
                    del seen[self.window]  # behind the first window
        found = {name: self._against(name) for name in checks}
        found[_LENGTH] = self._longer(checks)
        found |= {_ENTROPY: self._certain(), _REPEATED: self._repeating()}
        return [said for name, text in found.items() if (said := self._once(name, step, text))]

    def evaluated(self, step: int, accuracy: float) -> list[str]:
        """Take note of an accuracy; return a sentence if it is a sign that is told of now."""
        if not self.window or not self._prompts:
            return []
        self._accuracies = [*self._accuracies[:1], accuracy]
        first, rewards = self._accuracies[0], self._risen(_REWARD)
        if rewards is None or not is_significant_drop(first, accuracy, self._prompts):
            return []
        text = (
            f"reward/mean rose from {rewards.before:.3g} to {rewards.now:.3g} while accuracy on "
            f"{self._prompts} held-out prompts fell from {first:.2f} to {accuracy:.2f}: what is "
            "rewarded is not what is meant"
        )
        said = self._once("accuracy", step, text)
        return [said] if said else []

    def state(self) -> dict[str, Any]:
        """Windows, accuracies, and the signs that were told, as plain data."""
        return {
            "window": self.window,
            "seen": dict(self._seen),
            "accuracies": self._accuracies,
            "told": sorted(self._told),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where the one that gave `state` stopped, unless its windows were others."""
        if state["window"] == self.window:
            self._seen.clear()
            self._seen |= {name: list(values) for name, values in state["seen"].items()}
            self._accuracies, self._told = list(state["accuracies"]), set(state["told"])

    def _against(self, name: str) -> str:
        """Return a report if a function of `reward.check`, which is not trained on, falls while the
        reward rises."""
        if len(self._seen[name]) < len(self._seen[_REWARD]):  # it was not measured from the start
            return ""
        rewards, check = self._risen(_REWARD), self._risen(name, -1)
        if rewards is None or check is None:
            return ""
        return (
            f"reward/mean rose from {rewards.before:.3g} to {rewards.now:.3g} while {name}, which "
            f"is not rewarded, fell from {check.before:.3g} to {check.now:.3g}: what is rewarded "
            "is not what is meant"
        )

    def _longer(self, checks: Sequence[str]) -> str:
        """Responses that grew without anything but the reward becoming better, where there is a
        measure that would show it: longer thinking may be what is to be learned."""
        rewards, lengths = self._risen(_REWARD), self._since_start(_LENGTH)
        if rewards is None or lengths is None or lengths.now < _LENGTH_FACTOR * lengths.before:
            return ""
        evaluated = len(self._accuracies) > 1
        if not checks and not evaluated:
            return ""
        if evaluated and is_significant_drop(
            self._accuracies[1], self._accuracies[0], self._prompts
        ):
            return ""  # it rose
        if any(self._risen(name) for name in checks):
            return ""
        return (
            f"responses grew from {lengths.before:.0f} to {lengths.now:.0f} tokens while "
            f"reward/mean rose from {rewards.before:.3g} to {rewards.now:.3g}, and no evaluation "
            "or check did: see whether length itself is rewarded (algorithm.overlong_buffer and "
            "reward.shorter hold it)"
        )

    def _certain(self) -> str:
        entropies = self._since_start(_ENTROPY)
        if entropies is None or not entropies.now < _ENTROPY_SHARE * entropies.before:
            return ""
        return (
            f"policy/entropy fell from {entropies.before:.3g} to {entropies.now:.3g}: the policy "
            "hardly tries anything any more (algorithm.clip_high, algorithm.entropy_coefficient "
            "and algorithm.kl_coefficient hold it)"
        )

    def _repeating(self) -> str:
        shares = self._since_start(_REPEATED)
        if (
            shares is None
            or shares.before > _LOW_REPEATED_SHARE
            or shares.now < _HIGH_REPEATED_SHARE
        ):
            return ""
        return (
            f"{shares.now:.0%} of the responses were given before to the same prompt, at first "
            f"{shares.before:.0%}: samples of a prompt have nothing left to be compared by"
        )

    def _once(self, name: str, step: int, text: str) -> str:
        if not text or name in self._told:
            return ""
        self._told.add(name)
        return f"step {step}: {text}."

    def _since_start(self, name: str) -> _WindowMeans | None:
        """The means of the first and of the newest window; None: they overlap."""
        values = self._seen[name]
        if len(values) < 2 * self.window:
            return None
        return _WindowMeans(fmean(values[: self.window]), fmean(values[-self.window :]))

    def _risen(self, name: str, sign: int = 1) -> _WindowMeans | None:
        """Return the change of `_since_start` if the figure has risen (`sign` -1: fallen) by
        more than chance."""
        means = self._since_start(name)
        if means is None or sign * (means.now - means.before) <= 1e-9:
            return None
        newest = np.asarray(self._seen[name][-WINDOWS_KEPT * self.window :], np.float64)
        chance = math.sqrt(2 * variance_of_sums(newest) / self.window)
        # Few steps do not say well how much they scatter.
        least = _SIGNIFICANT_STANDARD_ERRORS * (1 + self.window / len(newest)) * chance
        return means if sign * (means.now - means.before) > least else None


def resolve_tripwire_window(config: Config) -> int:
    """Return the steps of a window; 0: nothing is watched."""
    if config.guard.tripwires is not None:
        return config.guard.tripwires
    return _DEFAULT_WINDOW if config.reward.check else 0
