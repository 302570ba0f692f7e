"""SIGTERM, which schedulers send some time before they take a machine away."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hybridrl.errors import Preempted

CLOSING_SECONDS = 6.0
"""Of the grace, what is kept for ending workers."""


@contextmanager
def on_sigterm(ask: Callable[[], None], grace_s: float, code: int) -> Iterator[None]:
    """In this block, the first SIGTERM calls `ask`; a second one, or the end of the grace, raises
    `Preempted` wherever the program is. When the grace is over the process ends with the exit code
    `code`, in this block or after it, whatever it waits for: Ray waits a minute for a cluster that
    has been ended at the same moment.

    Args:
        grace_s: Seconds from the first SIGTERM to the end of the process.
    """
    timers: list[threading.Timer] = []
    main = threading.main_thread().ident

    def handle(number: int, frame: FrameType | None) -> None:
        if timers:
            raise Preempted
        again = max(grace_s / 2, grace_s - CLOSING_SECONDS)
        timers.append(threading.Timer(again, signal.pthread_kill, (main, signal.SIGTERM)))
        timers.append(threading.Timer(grace_s, os._exit, (code,)))
        for timer in timers:
            timer.daemon = True
            timer.start()
        ask()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if timers else before)
        for timer in timers[:1]:
            timer.cancel()
