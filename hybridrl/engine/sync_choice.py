"""Which method the next sync takes: the one that is set, or the one that was measured to be faster.

Whether differences are worth their computation depends on the link, on the device and on how much
an update changes. So both ways are timed in a job's first syncs, again when the way that was chosen
takes longer than the other one did, and otherwise now and then. All ranks decide alike, for they
are told the same figures.
"""

from __future__ import annotations

from hybridrl.compress.weight_message import DELTA, FULL

AUTO = "auto"
CLEAR = 1.5
"""The other way takes so many times as long: no need to time both again."""
TRIALS = 3
"""Of each way, where they are close."""
TRIAL_SHARE = 0.02
"""Of all time for syncs, what it may take to try the other way again."""
SLOW_SYNCS = 2
"""So many in a row, of those that are timed, that take longer than the other way: no accident."""
LOOK_EVERY = 10
"""One of so many syncs is timed once a way was chosen: ranks have to wait for each other for it."""


class SyncChoice:
    """Decides sync by sync.

    Args:
        setting: `rollout.weight_sync`.
        refresh: `rollout.weight_sync_refresh`, which exact ways have no use for.
    """

    def __init__(self, setting: str, refresh: int = 0) -> None:
        self._is_auto = setting == AUTO
        is_exact = setting in (AUTO, FULL, DELTA)
        self._refresh = 0 if is_exact else refresh
        self._decided = None if self._is_auto else setting
        self._seconds: dict[str, list[float]] = {FULL: [], DELTA: []}
        self._slow = self._syncs = 0
        self._until = 0.0  # seconds of syncs before the other way is tried again

    @property
    def measures(self) -> bool:
        """Whether `note` is to be told what the next sync takes."""
        is_due = self._decided is None or (self._syncs + 1) % LOOK_EVERY == 0
        return self._is_auto and is_due

    @property
    def keeps(self) -> bool:
        """Whether the next sync may be a difference, or one after it a difference to it."""
        return self._decided != FULL

    def restart(self) -> None:
        """Syncs are counted from here on."""
        self._syncs = 0

    def method(self) -> str:
        """Of the next sync. (The first difference of a sender to a receiver goes as `full`.)"""
        self._syncs += 1
        if self._decided is None:
            # Values first, for differences are differences to them.
            return DELTA if len(self._seconds[DELTA]) < len(self._seconds[FULL]) else FULL
        if self._refresh and self._syncs % self._refresh == 0:
            return FULL
        return self._decided

    def note(self, method: str, seconds: float) -> None:
        """Takes what the sync by this method took, from the moment when all ranks had begun to the
        end of the last one."""
        if self._decided is None:
            self._seconds[method].append(seconds)
            if len(self._seconds[DELTA]) == len(self._seconds[FULL]):
                self._decide()
            return
        other = DELTA if self._decided == FULL else FULL
        self._slow = self._slow + 1 if seconds > min(self._seconds[other]) else 0
        self._until -= LOOK_EVERY * seconds
        if self._slow == SLOW_SYNCS or self._until <= 0:
            self._decided, self._seconds = None, {FULL: [], DELTA: []}

    def _decide(self) -> None:
        best = {method: min(seconds) for method, seconds in self._seconds.items()}
        faster = min(best, key=best.__getitem__)
        slower = max(best.values())
        if slower < CLEAR * best[faster] and len(self._seconds[FULL]) < TRIALS:
            return
        self._decided, self._slow = faster, 0
        self._until = slower / TRIAL_SHARE
