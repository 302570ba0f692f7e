"""Sections of the main thread in which a signal ends the run only afterwards.

A call that some ranks get and others do not is one that the first ones wait in for ever: whoever
interrupts the program there could no longer save a model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_depth = 0
_deferred: list[Callable[[], None]] = []


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """A section that `raise_between_sections` does not interrupt in the main thread."""
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
