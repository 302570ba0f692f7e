"""SIGTERM, which schedulers send some time before they take a machine away."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hybridrl.errors import Preempted

CLOSING_SECONDS = 8.0
"""What is kept of the grace for ending workers, which takes no longer, either."""


@contextmanager
def on_sigterm(ask: Callable[[], None], grace_s: float, code: int) -> Iterator[None]:
    """In this block, the first SIGTERM calls `ask`; a second one, or the end of the grace, raises
    `Preempted` wherever the program is. When the grace is over, or some seconds after the block,
    the process ends with the exit code `code`, whatever it waits for: Ray would wait much longer
    for a cluster that has been ended at the same moment.

    Args:
        grace_s: Seconds from the first SIGTERM to the end of the process.
    """
    main = threading.main_thread().ident
    asked: list[threading.Timer] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if asked:
            raise Preempted
        again = max(grace_s / 2, grace_s - CLOSING_SECONDS)
        asked.append(_after(again, signal.pthread_kill, main, signal.SIGTERM))
        _after(grace_s, os._exit, code)
        ask()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if asked else before)
        for timer in asked:
            timer.cancel()
            _after(CLOSING_SECONDS, os._exit, code)


def _after(seconds: float, function: Callable[..., Any], *arguments: Any) -> threading.Timer:
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()
    return timer
