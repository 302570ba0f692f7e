"""The choice of the method of the next weight sync: the one that is set, or the one measured to be
faster.

Whether differences are worth their computation depends on the link, on the device and on how much
an update changes. So both ways are timed in a job's first syncs, again when the way that was chosen
takes longer than the other one did, and otherwise now and then. All ranks decide alike, for they
are told the same figures.
"""

from __future__ import annotations

import math

from hybridrl.system.measured_choice import MeasuredChoice, quickest
from hybridrl.weights.weight_message import DELTA_SYNC, FULL_SYNC

AUTO_SYNC = "auto"
PLAIN_SYNC = "plain"
"""All values, and no record of them is kept: what `full` means where nothing else was set."""
_DECISIVE_RATIO = 2.5
"""Differences take so many times less than values with records of them: these are slow on the way,
not to record, and need not be timed without."""
_CLEAR_RATIO = 1.5
"""The other way takes so many times as long: no need to time both again."""
_TRIALS = 3
"""Of each way, where they are close."""
_TRIAL_TIME_SHARE = 0.02
"""Of all time for syncs, what it may take to try the other way again."""
_SLOW_SYNCS = 2
"""So many in a row, of those that are timed, that take longer than the other way: no accident."""
_TIME_EVERY = 10
"""One of so many syncs is timed once a way was chosen: ranks have to wait for each other for it."""


class SyncMethodChoice:
    """A choice of the sync method that is made anew for each sync.

    Args:
        setting: `rollout.weight_sync`.
        refresh: `rollout.weight_sync_refresh`, which exact ways have no use for.
    """

    def __init__(self, setting: str, refresh: int = 0) -> None:
        self._is_auto = setting == AUTO_SYNC
        is_exact = setting in (AUTO_SYNC, FULL_SYNC, DELTA_SYNC)
        self._refresh = 0 if is_exact else refresh
        self._decided = None if self._is_auto else setting
        # The first difference needs values to differ from.
        self._ahead = [FULL_SYNC, DELTA_SYNC]
        self._seconds: dict[str, list[float]] = {FULL_SYNC: [], DELTA_SYNC: [], PLAIN_SYNC: []}
        self._choice = MeasuredChoice(_SLOW_SYNCS)
        self._syncs = 0

    @property
    def measures(self) -> bool:
        """True if the next sync is timed, so that `note` must be called."""
        is_due = self._decided is None or (self._syncs + 1) % _TIME_EVERY == 0
        return self._is_auto and is_due

    @property
    def keeps(self) -> bool:
        """True if records of the sent values are kept."""
        return self._decided != FULL_SYNC

    def restart(self) -> None:
        """Restart the count of syncs."""
        self._syncs = 0

    def method(self) -> str:
        """Return the method of the next sync. (The first difference from a sender to a receiver is
        sent as `full`.)"""
        self._syncs += 1
        if self._decided is None:
            return self._ahead.pop(0)
        if self._refresh and self._syncs % self._refresh == 0:
            return FULL_SYNC
        return PLAIN_SYNC if self._decided == FULL_SYNC else self._decided

    def note(self, method: str, seconds: float) -> None:
        """Record the seconds of a sync by this method, from the moment when all ranks had begun to
        the end of the last one."""
        if self._decided is None:
            self._seconds[method].append(seconds)
            if not self._ahead:
                self._decide()
            return
        if self._choice.is_outdated(seconds, _TIME_EVERY * seconds):
            self._decided, self._ahead = None, [FULL_SYNC, DELTA_SYNC]
            self._seconds = {method: [] for method in self._seconds}

    def _decide(self) -> None:
        times = self._seconds
        full, delta = min(*times[FULL_SYNC], *times[PLAIN_SYNC], math.inf), min(times[DELTA_SYNC])
        tried = len(times[PLAIN_SYNC])
        needless = full <= delta or full >= _DECISIVE_RATIO * delta
        if not tried and not needless:
            self._ahead = [PLAIN_SYNC]
        elif 0 < tried < _TRIALS and max(full, delta) < _CLEAR_RATIO * min(full, delta):
            self._ahead = [DELTA_SYNC, PLAIN_SYNC]
        else:
            self._decided = quickest({FULL_SYNC: full, DELTA_SYNC: delta})
            # Longer than the other way took, or after so long that to try it again costs little.
            self._choice.hold(0.0, max(full, delta), max(full, delta) / _TRIAL_TIME_SHARE)
