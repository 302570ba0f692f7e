"""Searching the learning rate while training: which steps try a rate, and which rate the others
have.

AutoLRS (Jin et al. 2021, arXiv:2105.10762): training is cut into stages, each with one rate. From
the state at the start of a stage, some rates are tried for a tenth of its steps, one after another,
on the batches that the stage begins with; the loss that each would come to is forecast, and the
stage is trained from its start with the best. Stages double in length, up to 8 times the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from hybridrl.algorithms.loss_forecast import forecast_loss
from hybridrl.algorithms.rate_proposal import RateTrial, propose_rate

MIN_TRIAL_STEPS = 5
_TRIAL_SHARE = 0.1
"""Of a stage's steps, those of a trial."""
_MAX_GROWTH = 8
"""The longest stage, in first ones."""
_MAX_AGE = 3
"""Stages after which a trial is forgotten."""
_KAPPA = 2.0
"""Of the first trial of the first stage; later ones explore less."""
_WORST = 2.0
"""The value of a trial that diverged; none is worse."""
_WINDOW = 5
"""Losses whose median is compared with the start of the stage."""
_LEVEL_WINDOW = 20
"""Losses at the end of a stage that say where the next one starts."""
_EXPLOSION, _HARM, _NO_GAIN = 3.0, 1.5, 1.05
"""A stage has diverged with a loss so many times that at its start: a single one, the median of
`_WINDOW`, and the median of those at its end."""
_FALLBACK = 10.0
"""A stage that diverged is trained again with a rate so many times lower."""


class SearchMove(NamedTuple):
    """What is to be done before the next step.

    Attributes:
        rate: Its learning rate.
        keeps: A stage starts: its state is to be kept.
        restores: The state that was kept is to be restored first.
    """

    rate: float
    keeps: bool = False
    restores: bool = False


class RateSearch:
    """The search of one run, a step at a time.

    Args:
        lowest, highest: Rates that are tried.
        steps: Of the whole run, those of trials included.
        first_stage: Steps of the first stage; None: a sixteenth of the run's.
        trials: Number of rates that the first stage tries; later stages, which know those of the
            ones before, try half as many.
        fall: Share of the run's steps over which the rate falls to 0 at its end.
    """

    def __init__(
        self,
        lowest: float,
        highest: float,
        steps: int,
        first_stage: int | None,
        trials: int,
        fall: float,
    ) -> None:
        self._lowest, self._highest = math.log10(lowest), math.log10(highest)
        self._steps, self._trials = steps, trials
        self._first = first_stage or max(2 * MIN_TRIAL_STEPS, steps // 16)
        self._falling = round(fall * steps)
        self._done = self._stage = 0
        self._rate = 10 ** ((self._lowest + self._highest) / 2)
        self._length = 0  # of the stage
        self._left = 0  # trials to make in it, the one under way included
        self._losses: list[float] = []
        self._forecasts: list[tuple[float, float | None]] = []  # of the stage; None: it diverged
        self._known: list[RateTrial] = []  # of earlier stages
        self._level: float | None = None  # the loss at the start of the stage
        self._noise = 0.0

    @property
    def is_trial(self) -> bool:
        """Whether the next step belongs to a trial."""
        return self._left > 0

    @property
    def stage(self) -> int:
        """The number of the stage that is under way, from 1."""
        return self._stage

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        ahead = self._steps - self._done
        is_falling = not self.is_trial and ahead <= self._falling
        return self._rate * (ahead / (self._falling + 1) if is_falling else 1.0)

    @property
    def last_forecast(self) -> float | None:
        """The forecast of the stage's last trial that has ended; None if there is none, or if the
        trial diverged."""
        return self._forecasts[-1][1] if self._forecasts else None

    def begin(self) -> SearchMove:
        """Begin the first stage."""
        return self._begin_stage()

    def observe(self, loss: float) -> SearchMove | None:
        """Take note of the loss of a step, before its update; return what is to be done before the
        next one, None if that goes on as it is.

        Args:
            loss: Not finite, if the step could not be made.
        """
        before = self.rate
        self._done += 1
        self._losses.append(loss)
        if self._level is None and math.isfinite(loss):
            self._level = loss
        move = self._after_trial_step() if self.is_trial else self._after_stage_step()
        if move is None and self.rate != before:
            return SearchMove(self.rate)
        return move

    def _begin_stage(self) -> SearchMove:
        self._known = [
            RateTrial(place, value, age + 1)
            for place, value, age in [*self._known, *self._values()]
            if age < _MAX_AGE
        ]
        self._forecasts, self._losses = [], []
        self._length = self._first * min(2**self._stage, _MAX_GROWTH)
        self._left = self._trials if self._stage == 0 else -(-self._trials // 2)
        self._stage += 1
        ahead = self._steps - self._done
        self._left = min(self._left, ahead // (2 * MIN_TRIAL_STEPS))
        if ahead < 1.5 * self._cost:  # what is left would be no stage
            self._length = ahead
            while self._cost > ahead:
                self._length -= 1
        if self._stage > 1 and self._cost > 2 * self._length:
            self._left, self._length = 0, ahead
        return self._begin_trial(keeps=True) if self._left else SearchMove(self.rate, keeps=True)

    @property
    def _cost(self) -> int:
        """The number of steps of the stage, with those of its trials."""
        return self._length + self._left * self._trial_steps

    @property
    def _trial_steps(self) -> int:
        return max(MIN_TRIAL_STEPS, int(_TRIAL_SHARE * self._length))

    def _begin_trial(self, keeps: bool = False) -> SearchMove:
        self._losses = []
        kappa = _KAPPA * self._left / self._trials
        self._rate = 10 ** self._propose(kappa)
        return SearchMove(self.rate, keeps=keeps, restores=not keeps)

    def _propose(self, kappa: float) -> float:
        trials = [*self._known, *self._values()]
        return propose_rate(trials, self._lowest, self._highest, kappa)

    def _values(self) -> list[RateTrial]:
        """Return the trials of this stage, valued between the best of them and its start."""
        level = self._level or 0.0
        best = min((value for _, value in self._forecasts if value is not None), default=level)
        gain = max(level - best, 1e-6 * level, 1e-12)
        return [
            RateTrial(place, _WORST if value is None else min(_WORST, (value - best) / gain))
            for place, value in self._forecasts
        ]

    def _after_trial_step(self) -> SearchMove | None:
        has_diverged = self._has_exploded()
        if not has_diverged and len(self._losses) < self._trial_steps:
            return None
        found = None if has_diverged else forecast_loss(self._losses, self._length)
        self._forecasts.append((math.log10(self._rate), found))
        self._left -= 1
        if self.is_trial:
            return self._begin_trial()
        self._losses = []
        self._rate = 10 ** self._propose(0.0)
        self._length = min(self._length, self._steps - self._done)
        if self._steps - self._done - self._length < self._first:
            self._length = self._steps - self._done
        return SearchMove(self.rate, restores=True)

    def _has_exploded(self) -> bool:
        return not self._losses[-1] <= self._limit(_EXPLOSION)

    def _limit(self, times: float) -> float:
        """Return the most that a loss may be that may be so many times that at the stage's start;
        a loss that is no number is never less."""
        return math.inf if self._level is None else times * self._level + 3 * self._noise

    def _after_stage_step(self) -> SearchMove | None:
        is_over = len(self._losses) >= self._length
        most = self._limit(_NO_GAIN if is_over else _HARM)
        is_worse = len(self._losses) >= _WINDOW and median(self._losses[-_WINDOW:]) > most
        if self._has_exploded() or is_worse:
            self._rate /= _FALLBACK
            self._lowest = min(self._lowest, math.log10(self._rate))
            self._losses = []
            self._length = min(self._length, self._steps - self._done)
            return SearchMove(self.rate, restores=True)
        if not is_over or self._done >= self._steps:
            return None
        last = self._losses[-_LEVEL_WINDOW:]
        self._level = median(last)
        self._noise = 1.4826 * median(abs(loss - self._level) for loss in last)
        return self._begin_stage()

    def state(self) -> dict[str, Any]:
        """Return the state of the search, as plain data."""
        return {
            name.removeprefix("_"): value for name, value in vars(self).items() if name != "_steps"
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where the search that returned `state` stopped."""
        for name, value in state.items():
            setattr(self, f"_{name}", value)
        self._known = [RateTrial(*trial) for trial in self._known]
        self._forecasts = [(place, value) for place, value in self._forecasts]
