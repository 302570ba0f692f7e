"""Starts a program, and ends all that it leaves behind: `<python> launch.py SETTINGS PROGRAM ...`.

It needs only Python's standard library. What loses its parent becomes a child of this process,
whatever session it has moved to and however empty its environment, so that it is found. The exit
status is the program's.

The settings are JSON: `parent`, the process without which this one ends; `mark`, variables of the
program alone; `isolated`, whether it is kept from the processes outside (see `_isolate`); and
`prints`, whether a number that it printed counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

_PDEATHSIG, _DROP_CAPABILITY, _SUBREAPER, _NO_NEW_PRIVS = 1, 24, 36, 38
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_SCOPE_SIGNAL = 2
_CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 29, 31}
"""That root keeps: those of containers, but for device files. With others, such as SYS_ADMIN, it
may read any process's memory whatever Landlock says."""
_SCOPES_SINCE = 6
_STATUS = 125
"""Of a program whose number may be another's."""
MARK = "HYBRIDRL_ENVIRONMENT"
"""A variable that all descendants of a process inherit, so that they can be found and ended."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def can_isolate() -> bool:
    """Whether this kernel's Landlock knows scopes: Linux 6.12 and later."""
    return _LIBC.syscall(_CREATE_RULESET, None, 0, 1) >= _SCOPES_SINCE


def _isolate() -> None:
    """Keeps this process and its descendants from reading, tracing and signalling processes that
    are not among these; nothing else changes, but that setuid programs gain nothing, and that root
    loses capabilities."""
    for capability in set(range(64)) - _CAPABILITIES:
        _LIBC.prctl(_DROP_CAPABILITY, capability, 0, 0, 0)
    attributes = struct.pack("=3Q", 0, 0, _SCOPE_SIGNAL)
    ruleset = _LIBC.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    _LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    if _LIBC.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError(ctypes.get_errno(), "Landlock refuses to isolate the program")


def _children(pid: int | str) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def _descendants(pid: int | str) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)


def _holds(pid: int, file: os.stat_result) -> bool:
    """Whether a process has a file open."""
    with contextlib.suppress(OSError):
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.path.samestat(one.stat(), file):
                    return True
    return False


def _end_children(*_: Any) -> None:
    """Kills all, those too that become children meanwhile."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in _children("self"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            os.wait()


def _end(*_: Any) -> NoReturn:
    _end_children()
    os._exit(128 + signal.SIGTERM)


def main() -> None:
    """Runs the program to its end."""
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _end)
    _LIBC.prctl(_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != settings["parent"]:
        return
    program = os.fork()
    if program == 0:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        if settings["isolated"]:
            _isolate()
        os.execvpe(command[0], command, {**os.environ, **settings["mark"]})
    output = os.fstat(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for own in (0, 1):  # the program alone reads and writes there
        os.dup2(nothing, own)
    while (ended := os.wait())[0] != program:
        pass
    code = os.waitstatus_to_exitcode(ended[1])
    others = settings["prints"] and any(_holds(one, output) for one in _descendants("self"))
    _end_children()
    if others and code == 0:
        os.write(
            2,
            b"\nWhat this program had started still held its standard output when it ended, so the "
            b"number there may not be its own. Let it end what it starts, or give that another "
            b"output; or report the reward (environment.options.report).\n",
        )
        code = _STATUS
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
