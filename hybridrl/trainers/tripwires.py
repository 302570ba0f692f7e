"""Tripwires: signs that a rising reward is not what was meant.

A policy that finds a hole in its reward is rewarded more and more and is worse and worse by every
other measure. So the reward of a run is held against measures that it is not trained on: functions
of `reward.check`, evaluations of held-out prompts; and against the marks of a policy that repeats
itself. Windows of `guard.tripwires` steps are compared; what the steps of a window differ among
each other says what is chance.

Gao et al. 2023, arXiv:2210.10760 (a proxy rises while the gold reward falls).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridrl.config.schema import Config
from hybridrl.trainers.decline import fell

REWARD, LENGTH, ENTROPY, REPEATED = (
    *("reward/mean", "response/length_mean"),
    *("policy/entropy", "response/repeated"),
)
CHECK = "check/"
"""How the measures of `reward.check` begin."""
WINDOW_WITH_CHECK = 20
SIGNIFICANT = 5.0
"""So many standard errors are no chance, though the largest of many windows is compared."""
LONGER = 2.0
"""Responses of so many times their first length."""
LESS_ENTROPY = 0.1
"""Of what it was at first."""
FEW_REPEATED, MANY_REPEATED = 0.6, 0.9
"""Shares of responses that were given before to the same prompt."""


class Means(NamedTuple):
    """Means of a measure over two windows of steps."""

    before: float
    now: float


class Tripwires:
    """Watches the figures of a run; tells of each sign once.

    Args:
        config: Of the job.
        prompts: Held-out ones.

    Attributes:
        tripped: Signs told of so far.
    """

    def __init__(self, config: Config, prompts: int = 0) -> None:
        self.window = window_of(config)
        self._prompts = prompts
        self._seen: dict[str, list[float]] = defaultdict(list)
        self._best: tuple[float, int] | None = None  # accuracy, and steps seen before it
        self._told: set[str] = set()

    @property
    def tripped(self) -> int:
        return len(self._told)

    def look(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """What is to be said of a step that has ended."""
        if not self.window:
            return []
        checks = [name for name in metrics if name.startswith(CHECK) and name.count("/") == 1]
        for name in (REWARD, LENGTH, ENTROPY, REPEATED, *checks):
            seen, value = self._seen[name], metrics.get(name, math.nan)
            if math.isfinite(value) or seen:  # a step without a number is as the one before
                seen.append(value if math.isfinite(value) else seen[-1])
        found = {name: self._against(name) for name in checks}
        found |= {LENGTH: self._longer(), ENTROPY: self._certain(), REPEATED: self._repeating()}
        return [said for name, text in found.items() if (said := self._once(name, step, text))]

    def evaluated(self, step: int, accuracy: float) -> list[str]:
        """What is to be said of an evaluation."""
        steps = len(self._seen[REWARD])
        if not self.window or not self._prompts:
            return []
        if self._best is None or accuracy >= self._best[0]:
            self._best = accuracy, steps
            return []
        best, then = self._best
        rewards = self._compared(REWARD, max(0, then - self.window))
        if rewards is None or not fell(best, accuracy, self._prompts):
            return []
        text = (
            f"reward/mean rose from {rewards.before:.3g} to {rewards.now:.3g} while accuracy on "
            f"{self._prompts} held-out prompts fell from {best:.2f} to {accuracy:.2f}: what is "
            "rewarded is not what is meant"
        )
        said = self._once("accuracy", step, text)
        return [said] if said else []

    def _against(self, name: str) -> str:
        """A function that is only looked at, against the reward."""
        start = self._peak(name)
        if start is None:
            return ""
        check, rewards = self._means(name, start), self._compared(REWARD, start)
        if rewards is None or not self._differ(name, start, falling=True):
            return ""
        return (
            f"reward/mean rose from {rewards.before:.3g} to {rewards.now:.3g} while {name}, which "
            f"is not rewarded, fell from {check.before:.3g} to {check.now:.3g}: what is rewarded "
            "is not what is meant"
        )

    def _longer(self) -> str:
        rewards, lengths = self._compared(REWARD, 0), self._since_start(LENGTH)
        if rewards is None or lengths is None or lengths.now < LONGER * lengths.before:
            return ""
        return (
            f"responses grew from {lengths.before:.0f} to {lengths.now:.0f} tokens while "
            f"reward/mean rose from {rewards.before:.3g} to {rewards.now:.3g}: see whether length "
            "itself is rewarded (algorithm.overlong_buffer and reward.shorter hold it)"
        )

    def _certain(self) -> str:
        entropies = self._since_start(ENTROPY)
        if entropies is None or not entropies.now < LESS_ENTROPY * entropies.before:
            return ""
        return (
            f"policy/entropy fell from {entropies.before:.3g} to {entropies.now:.3g}: the policy "
            "hardly tries anything any more (algorithm.clip_high, algorithm.entropy_coefficient "
            "and algorithm.kl_coefficient hold it)"
        )

    def _repeating(self) -> str:
        shares = self._since_start(REPEATED)
        if shares is None or shares.before > FEW_REPEATED or shares.now < MANY_REPEATED:
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

    def _since_start(self, name: str) -> Means | None:
        return self._means(name, 0) if len(self._seen[name]) >= 2 * self.window else None

    def _compared(self, name: str, start: int) -> Means | None:
        """The means of the window that begins at `start` and of the last one, if it has risen by
        more than chance."""
        enough = len(self._seen[name]) >= start + 2 * self.window
        return self._means(name, start) if enough and self._differ(name, start) else None

    def _peak(self, name: str) -> int | None:
        """Where the window of the largest mean begins, among those that end before the last."""
        values = self._seen[name]
        if len(values) < 2 * self.window or len(self._seen[REWARD]) != len(values):
            return None
        sums = np.cumsum([0.0, *values[: -self.window]])
        return int((sums[self.window :] - sums[: -self.window]).argmax())

    def _means(self, name: str, start: int) -> Means:
        before, now = self._windows(name, start)
        return Means(float(before.mean()), float(now.mean()))

    def _differ(self, name: str, start: int, *, falling: bool = False) -> bool:
        before, now = self._windows(name, start)
        chance = math.sqrt((before.var() + now.var()) / max(1, self.window - 1))
        gain = float(now.mean() - before.mean())
        return (-gain if falling else gain) > max(SIGNIFICANT * chance, 1e-9)

    def _windows(self, name: str, start: int) -> tuple[npt.NDArray[np.float64], ...]:
        values = np.asarray(self._seen[name], np.float64)
        return values[start : start + self.window], values[-self.window :]


def window_of(config: Config) -> int:
    """Steps of a window; 0: nothing is watched."""
    if config.guard.tripwires is not None:
        return config.guard.tripwires
    return WINDOW_WITH_CHECK if config.reward.check else 0
