"""Signals that end a run: Ctrl-C, SIGTERM of a scheduler, SIGHUP of a terminal that is closed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from hybridrl.config.schema import CLOSE_TIMEOUT_S, RecoveryConfig
from hybridrl.errors import EXIT_INTERRUPTED, PreemptionInterrupt
from hybridrl.system.deferred_interrupts import raise_between_sections

HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_CLOSING_SECONDS = 60.0
"""The time limit of closing; a tracker may still have something to send. After a signal the grace
period may end it earlier."""


class SignalHandler:
    """A context manager that handles these signals in the main thread. The first signal calls
    `on_interrupt` or `on_terminate`, which end the run at once by an exception (but see
    `interrupts_deferred`) or after the current step. A second signal, or the end of the time to
    save, raises wherever the program is. When the grace period is over, or some seconds after a
    second signal, or a minute after `closing`, the process exits whatever it is waiting for.

    Args:
        recover: Its grace begins with the first signal, and ends with the process.
        terminated: Exit code after SIGTERM and SIGHUP.

    Attributes:
        on_terminate: Called with the signal's name by the first SIGTERM or SIGHUP.
        on_interrupt: Called by the first Ctrl-C.
    """

    def __init__(self, recover: RecoveryConfig, terminated: int = EXIT_INTERRUPTED) -> None:
        self._recover, self._terminated = recover, terminated
        self._asked = ""
        self._code = 0
        self._is_closing = False
        self._timers: list[threading.Timer] = []
        self._second_signal: threading.Timer | None = None
        self._before: dict[int, Any] = {}
        self._terminal = [output for output in (1, 2) if os.isatty(output)]
        self.on_terminate: Callable[[str], None] = lambda name: self._raise()
        self.on_interrupt: Callable[[], None] = self._raise

    def __enter__(self) -> SignalHandler:
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED_SIGNALS:
                # Whoever started the program with `nohup`, or in the background, wants it ignored.
                if (handler := signal.getsignal(number)) is not signal.SIG_IGN:
                    self._before[number] = handler
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def closing(self, code: int) -> None:
        """Mark the run as done or given up before its resources are closed: signals no longer
        interrupt it, and closing gets a time limit.

        Args:
            code: With which the process ends if it does.
        """
        self._is_closing = True
        self._code = self._code or code
        if self._second_signal is not None:
            self._second_signal.cancel()
        self._end_within(MAX_CLOSING_SECONDS)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if number == signal.SIGHUP:  # nobody reads there any more, and to write would be an error
            for output in self._terminal:
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        if self._is_closing:
            self._end_within(CLOSE_TIMEOUT_S)
            return
        if self._asked:
            self._end_within(CLOSE_TIMEOUT_S)
            self._raise()
        self._asked = name
        is_interrupt = number == signal.SIGINT
        self._code = EXIT_INTERRUPTED if is_interrupt else self._terminated
        self._end_within(self._recover.grace_s)
        again = (threading.main_thread().ident, signal.Signals(number))
        self._second_signal = threading.Timer(self._recover.save_s, signal.pthread_kill, again)
        self._start(self._second_signal)
        end = self.on_interrupt if is_interrupt else partial(self.on_terminate, name)
        raise_between_sections(end)

    def _raise(self) -> None:
        if self._code not in (0, EXIT_INTERRUPTED):
            raise PreemptionInterrupt(self._asked)
        raise KeyboardInterrupt(self._asked)

    def _end_within(self, seconds: float) -> None:
        self._start(threading.Timer(seconds, self._end, (seconds,)))

    def _start(self, timer: threading.Timer) -> None:
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _end(self, seconds: float) -> None:
        if not self._asked:
            said = f"Closing took more than {seconds:g} s, and was cut off.\n"
            os.write(2, said.encode())  # whoever hangs may have the lock of sys.stderr
        os._exit(self._code)


def exit_after_signal(code: int) -> NoReturn:
    """Exit after a signal; neither another signal nor anything that hangs prevents it."""
    for number in HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    timer = threading.Timer(CLOSE_TIMEOUT_S, os._exit, (code,))
    timer.daemon = True
    timer.start()
    sys.exit(code)
