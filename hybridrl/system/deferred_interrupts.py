"""Sections of the main thread in which a signal ends the run only afterwards.

If an interrupt came while a call is sent to the ranks, those that have it would wait for the others
forever, and the model could no longer be saved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_depth = 0
_deferred: list[Callable[[], None]] = []


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer what a signal raises in the main thread (`raise_between_sections`) to the end of the
    block."""
    global _depth
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _deferred and not _depth:
            _deferred.pop()()


def raise_between_sections(end: Callable[[], None]) -> None:
    """Call `end`, which ends the run by an exception, from a signal's handler: at once, or at the
    end of the section that the signal met."""
    if _depth:
        _deferred[:] = [end]
    else:
        end()
