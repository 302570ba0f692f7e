"""Searching the learning rate while training: which steps try a rate, and which rate the others
have.

AutoLRS (Jin et al. 2021, arXiv:2105.10762): training is cut into stages, each with one rate. From
the state at the start of a stage, some rates are tried for a tenth of its steps, one after another,
on the batches that the stage begins with, and the stage is trained with the best. Stages double in
length, up to 8 times the first.

The first stage forecasts the loss that each rate would come to. A later stage compares the rate of
the stage before with one other. The trial with the rate of the stage before comes second, and the
stage continues from it if that rate stays, so that only the other trial is lost. The rate falls at
the end of these trials: a high rate makes the loss noisy, and a fall shows how far it has come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from hybridrl.algorithms.loss_forecast import forecast_loss
from hybridrl.algorithms.rate_proposal import RateTrial, find_lowest_good_rate, propose_rate

MIN_TRIAL_STEPS = 5
_VALIDATED_STEPS = 10
"""A trial of the first stage with so many steps is judged by held-out losses, a shorter one by the
losses of its steps."""
_VALIDATIONS = 3
"""Of such a trial; those of later stages have one, at their end."""
_REACH = 0.4
"""Later stages try rates within so many decades of that of the stage before."""
_SAME = 0.1
"""Rates within so many decades are one."""
_TRIAL_SHARE = 0.1
"""Of a stage's steps, those of a trial."""
_TRIAL_FALL = 0.4
"""Of the steps of a trial of later stages, those over which the rate falls."""
_MAX_GROWTH = 8
"""The longest stage, in first ones."""
_MAX_AGE = 3
"""Stages after which a trial is forgotten."""
_KAPPA, _LATER_KAPPA = 2.0, 1.0
"""Of the first trial of the first stage, after which they explore less, and of later stages."""
_TIE = 0.03
"""The first stage takes the lowest rate whose predicted value is above that of the best by no more
than this share of the gain, for the best rate of a few steps is too high for many."""
_HARMLESS = 0.002
"""Where no rate has learned, it takes the highest one whose loss is above that of the best by less,
as a share of the loss at the start."""
_LOWER, _HIGHER = 0.2, 0.05
"""Share of the gain by which another rate must be better than that of the stage before, to take its
place: a lower one by more, since low rates are ahead for as long as a trial, and the rate falls in
the end anyway."""
_LEAST_GAIN = 0.02
"""Of the loss at the start of a stage: smaller differences between rates are noise."""
_WORST = 2.0
"""The value of a trial that diverged; none is worse."""
_TRIAL_LOSSES = 3
"""Losses at the end of a trial whose median judges it where there is no held-out loss."""
_WINDOW = 5
"""Losses whose median is compared with the start of the stage."""
_LEVEL_WINDOW = 20
"""Losses at the end of a stage that say where the next one starts."""
_EXPLOSION, _HARM, _NO_GAIN = 3.0, 1.5, 1.05
"""A stage has diverged with a loss so many times that at its start: a single one, the median of
`_WINDOW`, and the median of those at its end."""
_FALLBACK = 10.0
"""A stage that diverged is trained again with a rate so many times lower."""
_MAX_RESTARTS = 6
"""Of a stage; then it goes on, whatever its losses are."""
_NO_LOSS = 1e300
"""Stands for a loss that is no number."""
_SAME_RISE = 0.8
"""A loss that is as high as this share of what it was with a higher rate comes from its rows."""


class SearchMove(NamedTuple):
    """An instruction for the time before the next step.

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
        trials: Number of rates that the first stage tries at most.
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
        self._is_last = False
        self._left = 0  # trials to make in it, the one under way included
        self._losses: list[float] = []
        self._held_out: list[float] = []  # of the trial
        self._forecasts: list[tuple[float, float | None]] = []  # of the stage; None: it diverged
        self._known: list[RateTrial] = []  # of earlier stages
        self._level: float | None = None  # the loss at the start of the stage
        self._noise = 0.0
        self._restarts = 0  # of the stage
        self._rise = (0, 0.0)  # the step and the loss for which it was restarted last
        self._reached = 0.0  # the logarithm of the rate of the stage before
        self._other = 0.0  # that of the rate that is compared with it

    @property
    def is_trial(self) -> bool:
        """Return whether the next step belongs to a trial."""
        return self._left > 0

    @property
    def stage(self) -> int:
        """The number of the stage that is under way, from 1."""
        return self._stage

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        ahead, falling = self._steps - self._done, self._falling
        if self.is_trial:
            ahead = self._trial_steps - len(self._losses)
            falling = max(1, round(_TRIAL_FALL * self._trial_steps)) if self._stage > 1 else 0
        return self._rate * min(1.0, ahead / (falling + 1))

    @property
    def last_forecast(self) -> float | None:
        """The forecast of the stage's last trial that has ended; None if there is none, or if the
        trial diverged."""
        return self._forecasts[-1][1] if self._forecasts else None

    @property
    def wants_validation(self) -> bool:
        """Return whether the held-out loss after the current step is needed."""
        return self.is_trial and len(self._losses) + 1 in self._validated_at

    @property
    def _validated_at(self) -> list[int]:
        steps = self._trial_steps
        if self._stage > 1:
            return [steps]
        if steps < _VALIDATED_STEPS:
            return []
        return [steps * (number + 1) // _VALIDATIONS for number in range(_VALIDATIONS)]

    def begin(self) -> SearchMove:
        """Begin the first stage."""
        return self._begin_stage()

    def observe(self, loss: float, held_out: float | None = None) -> SearchMove | None:
        """Take note of the loss of a step, before its update; return what is to be done before the
        next one, None if that goes on as it is.

        Args:
            loss: Not finite, if the step could not be made.
            held_out: The loss of the held-out data after it, where it is known.
        """
        before = self.rate
        self._done += 1
        self._losses.append(loss)
        self._held_out += [] if held_out is None else [held_out]
        if self._level is None and math.isfinite(loss):
            self._level = loss
        move = self._after_trial_step() if self.is_trial else self._after_stage_step()
        if move is None and self.rate != before:
            return SearchMove(self.rate)
        return move

    def _begin_stage(self) -> SearchMove:
        self._known = [
            RateTrial(place, value, age + 1) for place, value, age in self._known if age < _MAX_AGE
        ]
        self._forecasts, self._losses, self._held_out = [], [], []
        self._restarts, self._rise = 0, (0, 0.0)
        self._reached = math.log10(self._rate)
        self._length = self._first * min(2**self._stage, _MAX_GROWTH)
        self._left = self._trials if self._stage == 0 else 2
        self._stage += 1
        ahead = self._steps - self._done
        self._left = min(self._left, ahead // (2 * MIN_TRIAL_STEPS))
        self._is_last = ahead < 1.5 * self._cost  # what is left would be no stage
        if self._stage > 1:
            is_short = self._left < 2 or ahead < self._cost + self._falling
            self._other = self._reached if is_short else self._propose(_LATER_KAPPA)
            if abs(self._other - self._reached) < _SAME:
                self._left = 0
        if self._is_last:
            self._length = ahead
            while self._cost > ahead:
                self._length -= 1
        return self._begin_trial(keeps=True) if self._left else SearchMove(self.rate, keeps=True)

    @property
    def _bounds(self) -> tuple[float, float]:
        """The logarithms of the lowest and the highest rate to try."""
        if self._stage == 1:
            return self._lowest, self._highest
        reached = self._reached - _REACH, self._reached + _REACH
        lowest = max(reached[0], min(self._lowest, self._reached))
        return lowest, max(lowest, min(reached[1], self._highest))

    @property
    def _cost(self) -> int:
        """The number of steps of the stage, with those of its trials."""
        return self._length + self._left * self._trial_steps

    @property
    def _trial_steps(self) -> int:
        return max(MIN_TRIAL_STEPS, int(_TRIAL_SHARE * self._length))

    def _begin_trial(self, keeps: bool = False) -> SearchMove:
        if self._stage == 1:
            place = self._propose(_KAPPA * self._left / self._trials)
            if any(abs(place - tried) < _SAME for tried, _ in self._forecasts):
                return self._end_search()
        else:
            place = self._other if self._left > 1 else self._reached
        self._rate = 10**place
        self._losses, self._held_out = [], []
        return SearchMove(self.rate, keeps=keeps, restores=not keeps)

    def _propose(self, kappa: float) -> float:
        """Return the logarithm of a rate within reach."""
        return propose_rate([*self._known, *self._values()], *self._bounds, kappa)

    def _end_search(self) -> SearchMove:
        """Begin to train at the best rate. If that is the rate of the last trial, what it has
        trained is the beginning of the stage."""
        self._left, last = 0, self._forecasts[-1]
        trials = self._values()
        self._known += trials
        if self._stage == 1:
            place = self._choose_first(trials)
        else:
            other, before = trials
            gain = _LOWER if other.place < before.place else _HIGHER
            place = (other if other.value < before.value - gain else before).place
        self._rate = 10**place
        goes_on = last[1] is not None and abs(place - last[0]) < _SAME
        if goes_on:
            self._rate = 10 ** last[0]
        else:
            self._losses = []
        if self._is_last:  # its search may have taken fewer steps than it could have
            self._length = self._steps - self._done + len(self._losses)
        return SearchMove(self.rate, restores=not goes_on)

    def _choose_first(self, trials: list[RateTrial]) -> float:
        """Return the logarithm of the rate of the first stage. Where no rate has learned anything
        in so few steps, only a high one can have shown that it is wrong."""
        level = self._level or 0.0
        known = [value for _, value in self._forecasts if value is not None]
        if known and level - min(known) < _LEAST_GAIN * level:
            most = min(known) + _HARMLESS * abs(level)
            return max(
                place for place, value in self._forecasts if value is not None and value <= most
            )
        if len(trials) == 1 and known:
            return trials[0].place
        return find_lowest_good_rate(trials, *self._bounds, _TIE)

    def _values(self) -> list[RateTrial]:
        """Return the trials of this stage, valued between the best of them and its start."""
        level = self._level or 0.0
        known = [value for _, value in self._forecasts if value is not None] or [level]
        # Batches that are harder than those before raise all forecasts of a stage.
        best = min(known)
        gain = max(min(max(known), best + level) - best, level - best, _LEAST_GAIN * level, 1e-12)
        return [
            RateTrial(place, _WORST if value is None else min(_WORST, (value - best) / gain))
            for place, value in self._forecasts
        ]

    def _after_trial_step(self) -> SearchMove | None:
        has_diverged = self._has_exploded()
        if not has_diverged and len(self._losses) < self._trial_steps:
            return None
        self._forecasts.append((math.log10(self._rate), None if has_diverged else self._forecast()))
        self._left -= 1
        return self._begin_trial() if self.is_trial else self._end_search()

    def _forecast(self) -> float | None:
        """Return the loss that the trial's rate would come to; in later stages, has come to."""
        if not all(map(math.isfinite, self._held_out)):
            return None
        if self._stage > 1:
            return self._held_out[-1] if self._held_out else median(self._losses[-_TRIAL_LOSSES:])
        if self._held_out:
            return forecast_loss(self._held_out, self._length, self._validated_at)
        return forecast_loss(self._losses, self._length)

    def _has_exploded(self) -> bool:
        return not math.isfinite(self._losses[-1]) or self._losses[-1] > self._limit(_EXPLOSION)

    def _limit(self, times: float) -> float:
        """Return so many times the loss at the start of the stage, and three times its noise."""
        return math.inf if self._level is None else times * self._level + 3 * self._noise

    def _after_stage_step(self) -> SearchMove | None:
        is_over = len(self._losses) >= self._length
        most = self._limit(_NO_GAIN if is_over else _HARM)
        is_worse = len(self._losses) >= _WINDOW and median(self._losses[-_WINDOW:]) > most
        if self._restarts < _MAX_RESTARTS and (self._has_exploded() or is_worse):
            loss = self._losses[-1]
            rise = len(self._losses), loss if math.isfinite(loss) else _NO_LOSS
            before = self._rise
            is_of_rows = rise[0] == before[0] and not rise[1] < _SAME_RISE * before[1]
            if not is_of_rows:
                self._restarts, self._rise = self._restarts + 1, rise
                self._rate /= _FALLBACK
                self._losses = []
                self._length = min(self._length, self._steps - self._done)
                return SearchMove(self.rate, restores=True)
            self._restarts, self._rate = _MAX_RESTARTS, self._rate * _FALLBACK
        if not math.isfinite(self._losses[-1]):  # nothing was learned from its rows
            self._losses[-1] = self._level or 0.0
        if not is_over or self._done >= self._steps:
            return None
        last = self._losses[-_LEVEL_WINDOW:]
        self._level = median(last)
        self._noise = 1.4826 * median(abs(loss - self._level) for loss in last)
        return self._begin_stage()

    def state(self) -> dict[str, Any]:
        """Return the state of the search, as plain data."""
        settings = ("_lowest", "_highest", "_steps", "_trials", "_first", "_falling")
        return {
            name.removeprefix("_"): value
            for name, value in vars(self).items()
            if name not in settings
        }

    def load_state(self, state: Mapping[str, Any]) -> SearchMove:
        """Continue where the search that returned `state` stopped; return what is to be done before
        the next step."""
        for name, value in state.items():
            setattr(self, f"_{name}", value)
        self._known = [RateTrial(*trial) for trial in self._known]
        self._forecasts = [(place, value) for place, value in self._forecasts]
        self._rise = (self._rise[0], self._rise[1])
        if self.is_trial and self._stage > 1 and "other" not in state:
            # Before 28 November 2026 later stages had trials of other kinds: they are left out.
            self._left, self._rate = 0, 10**self._reached
            self._losses, self._held_out, self._forecasts = [], [], []
            if self._is_last:
                self._length = self._steps - self._done
            return SearchMove(self.rate, restores=True)
        return SearchMove(self.rate)
