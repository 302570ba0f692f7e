"""Episodes for external programs, which ask for a row, play it and report a reward within a time
limit."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from hybridrl.environments.episode_request import EpisodeRequest, EpisodeResult

_log = logging.getLogger(__name__)

REMINDER_INTERVAL_S = 60.0
"""So often the log says that rows wait for programs."""


class EpisodeRunner(Protocol):
    """A player of episodes: `EnvironmentPool`, or programs from outside."""

    def start(self, group: Sequence[EpisodeRequest]) -> None:
        """Queue the samples of one prompt; never blocks."""

    def poll(self) -> list[EpisodeResult]:
        """Return the episodes that have ended since the last call."""

    def cancel(self) -> None:
        """Drop all episodes that have not ended."""

    def close(self) -> None:
        """End the programs."""


class ExternalPrograms:
    """The episodes that wait for external programs, and those that are being played.

    Args:
        timeout_s: Longest time from asking for a row to its reward.

    Attributes:
        notify: Called when `poll` has something to give.
        is_closed: Whether the job has ended, and no row will come.
    """

    def __init__(self, timeout_s: float) -> None:
        self.notify: Callable[[], None] = lambda: None
        self.is_closed = False
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._asking: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._waiting: deque[EpisodeRequest] = deque()
        self._played: dict[
            str, tuple[EpisodeRequest, float]
        ] = {}  # by session, and when it is given up
        self._done: list[EpisodeResult] = []
        self._reminded = time.monotonic()

    def start(self, group: Sequence[EpisodeRequest]) -> None:
        """Queue rows for the programs that ask next."""
        with self._lock:
            self._waiting.extend(group)
            self._reminded = time.monotonic()
            asking, self._asking = self._asking, []
        for loop, event in asking:
            loop.call_soon_threadsafe(event.set)

    async def next(self, wait_s: float) -> EpisodeRequest | None:
        """Return the next row; None if there is none for `wait_s` seconds, or never again: see
        `is_closed`."""
        loop, until = asyncio.get_running_loop(), time.monotonic() + wait_s
        while not self.is_closed:
            event = asyncio.Event()
            with self._lock:
                if self._waiting:
                    play = self._waiting.popleft()
                    self._played[play.session] = play, time.monotonic() + self._timeout_s
                    return play
                self._asking.append((loop, event))
            try:
                await asyncio.wait_for(event.wait(), until - time.monotonic())
            except TimeoutError:
                return None
        return None

    def return_row(self, play: EpisodeRequest) -> None:
        """Requeue a row that did not reach the program that asked for it."""
        with self._lock:
            if self._played.pop(play.session, None) is None:
                return
        self.start([play])

    def reported(self, session: str) -> None:
        """Finish the episode of a session whose program has reported its reward."""
        with self._lock:
            found = self._played.pop(session, None)
            if found is not None:
                self._done.append(EpisodeResult(found[0].key, math.nan, None, {}, None, "ok"))
        self.notify()

    def poll(self) -> list[EpisodeResult]:
        """Return the episodes that have ended since the last call, including expired ones; never
        blocks."""
        now = time.monotonic()
        with self._lock:
            late = [name for name, (_, end) in self._played.items() if end < now]
            for play, _ in map(self._played.pop, late):
                said = (
                    f"Its program did not report a reward within `environment.timeout_s` "
                    f"({self._timeout_s:g} s) after it had asked for the row."
                )
                self._done.append(EpisodeResult(play.key, math.nan, None, {}, said, "timeout"))
            done, self._done = self._done, []
            if self._waiting and not self._played and now - self._reminded > REMINDER_INTERVAL_S:
                self._reminded = now
                _log.warning(
                    "%d rows wait for programs that ask for them at %s/episodes/next.",
                    len(self._waiting),
                    self._waiting[0].url.partition("/session/")[0],
                )
        return done

    def cancel(self) -> None:
        with self._lock:
            self._waiting.clear()
            self._played.clear()
            self._done.clear()

    def close(self) -> None:
        """Drop all episodes and answer programs that wait for a row; they end by themselves."""
        self.is_closed = True
        self.cancel()
        self.start([])
