"""Work that a rank does beside its calls, on a thread of its own."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")
NICENESS = 10
"""Of the thread, on Linux: work in the foreground comes first where cores are scarce."""


class Background(Generic[T]):
    """Does one thing at a time."""

    def __init__(self) -> None:
        self._last: Future[T] | None = None
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(self, work: Callable[[Callable[[], bool]], T]) -> None:
        """Begins some work, after what was begun before is done; raises as `settle` does.

        Args:
            work: Called on the thread, with a function that says whether it is to give up.
        """
        self.settle()
        self._last = last = Future[T]()

        def run() -> None:
            _give_way()
            try:
                last.set_result(work(self._stopped.is_set))
            except BaseException as error:
                last.set_exception(error)

        # It ends with the process: a rank that is to die does not write on.
        self._thread = threading.Thread(target=run, name="background", daemon=True)
        self._thread.start()

    def result(self, wait: bool) -> T | None:
        """What the last work gave; None if nothing was begun, or if it is still under way and is
        not to be waited for.

        Raises:
            Exception: what it raised.
        """
        if self._last is None or not (wait or self._last.done()):
            return None
        return self._last.result()

    def settle(self) -> None:
        """Waits for the last work and forgets it.

        Raises:
            Exception: what it raised.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Has the work give up, and waits until it has."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()


def _give_way() -> None:
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
