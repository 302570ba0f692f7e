"""An asyncio loop in its own thread for the user's coroutines, safe against what they do."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from hybridrl.system.daemon_threads import DaemonThreads

_HEARTBEAT_S = 0.1
"""How often a loop shows that it is alive, and how often we look."""
_GRACE_S = 0.5
"""A call ends by itself at the time limit; this much later it is given up."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoroutineResult:
    """The result of a coroutine: a value, an error, or neither because it timed out."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False


@dataclass
class _Call:
    then: Callable[[CoroutineResult], None]
    started: float | None = None  # on the monotonic clock; None while it waits for its turn


class UserCodeLoop:
    """An asyncio loop for user code, whose results are delivered in the caller's own thread.

    Nothing that a coroutine does stops the others for longer than the time limit. One that waits
    is cancelled; one that will not be cancelled is forgotten; one that blocks the loop is left
    behind with its thread, and the loop is replaced. Then the calls under way are lost with it:
    they time out too, because what they wait for lives in the blocked loop.

    Args:
        timeout_s: Longest time for one coroutine.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count()
        self._outcomes: queue.SimpleQueue[tuple[int, CoroutineResult]] = queue.SimpleQueue()
        self._thread = _LoopThread()

    @property
    def pending(self) -> int:
        """The number of calls whose result has not been delivered."""
        return len(self._calls)

    def submit(
        self,
        function: Callable[[], Coroutine[Any, Any, Any]],
        then: Callable[[CoroutineResult], None],
    ) -> None:
        """Start a coroutine; `deliver` passes its result to `then`."""
        number = next(self._numbers)
        self._calls[number] = call = _Call(then)
        thread = self._thread
        asyncio.run_coroutine_threadsafe(self._run(thread, number, call, function), thread.loop)

    def deliver(self, wait: bool) -> None:
        """Pass results that have arrived to their callbacks.

        Args:
            wait: Whether to wait for the first, if any call is pending.
        """
        delivered = False
        while True:
            try:
                number, outcome = self._outcomes.get(timeout=_HEARTBEAT_S if wait else 0.0)
            except queue.Empty:
                delivered |= self._give_up_overdue()
                if not wait or delivered or not self._calls:
                    return
                continue
            call = self._calls.pop(number, None)
            if call is not None:  # otherwise it was given up
                call.then(outcome)
                delivered, wait = True, False

    def forget(self) -> None:
        """Drop all pending calls; nobody waits for them any more."""
        self._calls.clear()

    def close(self) -> None:
        """Cancel the running coroutines and stop the thread."""
        self.forget()
        self._thread.stop()
        self._thread.join(timeout=1.0)

    async def _run(
        self,
        thread: _LoopThread,
        number: int,
        call: _Call,
        function: Callable[[], Coroutine[Any, Any, Any]],
    ) -> None:
        call.started = thread.alive_at = time.monotonic()
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                outcome = CoroutineResult(await function())
        except BaseException as error:  # sys.exit() in a tool ends its episode, not the loop
            if isinstance(error, TimeoutError) and limit.expired():
                outcome = CoroutineResult(timed_out=True)
            else:
                outcome = CoroutineResult(error=error)
        thread.alive_at = time.monotonic()
        self._outcomes.put((number, outcome))

    def _give_up_overdue(self) -> bool:
        """Time out the overdue calls and return whether there were any."""
        latest = time.monotonic() - self._timeout_s - _GRACE_S
        blocked = self._calls and self._thread.alive_at < latest
        if blocked:
            _log.warning(
                "A call of `rollout.episode` blocks the asyncio loop for more than "
                "`rollout.tool_timeout_s` (%g s); %d calls are given up. Blocking work belongs "
                "into `await asyncio.to_thread(...)`. It stands here:\n%s",
                self._timeout_s,
                len(self._calls),
                self._thread.stack(),
            )
            self._thread.stop()
            self._thread = _LoopThread()
        overdue = [
            number
            for number, call in self._calls.items()
            if blocked or (call.started is not None and call.started < latest)
        ]
        for call in [self._calls.pop(number) for number in overdue]:
            call.then(CoroutineResult(timed_out=True))
        return bool(overdue)


class _LoopThread(threading.Thread):
    """An asyncio loop and its thread, which never keeps the process alive."""

    def __init__(self) -> None:
        super().__init__(name="episodes", daemon=True)
        self.alive_at = time.monotonic()
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self.start()
        self._ready.wait()

    def run(self) -> None:
        with asyncio.Runner() as runner:  # cancels what still runs when it closes
            runner.run(self._beat())

    def stop(self) -> None:
        """Ask the loop to end as soon as it can."""
        self._stopping.set()

    def stack(self) -> str:
        """Return the end of the thread's stack as text."""
        frame = sys._current_frames().get(self.ident or 0)
        return "".join(traceback.format_stack(frame)[-4:]) if frame else "it has ended"

    async def _beat(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.set_default_executor(DaemonThreads())
        self._ready.set()
        while not self._stopping.is_set():
            self.alive_at = time.monotonic()
            await asyncio.sleep(_HEARTBEAT_S)
