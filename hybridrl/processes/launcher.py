"""Start a program and end all that it leaves behind: `<python> launcher.py SETTINGS PROGRAM ...`.

It needs only Python's standard library. What loses its parent becomes a child of this process,
whatever session it has moved to and however empty its environment, so that it is found: when the
program ends, when SIGTERM asks for it, and when the parent of this process is gone. The exit status
is the program's.

The settings are JSON: `parent`, the process without which this one ends, and optionally

* `isolated`: keep the program from the processes outside (see `_isolate`);
* `prints`: a number that the program printed counts, unless others hold its output at its end;
* `connection`, `page`: descriptors that the program has, too: the way to its pool, and a page of
  shared memory (see `SHARED`);
* `entrance`: the descriptor of a memory group that the program enters;
* `memory`: bytes that the program may take with all that it starts, where there is no such group.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

SHARED = ("item", "deadline_ns", "memory", "swept")
"""What stands in the shared page, 64 bits each: the item that the program runs just now (0: none,
or it is not known), until when on the monotonic clock (0: for ever), the bytes for which this
process has ended the program, and whether nothing is left of it."""
_PDEATHSIG, _DROP_CAPABILITY, _SUBREAPER, _NO_NEW_PRIVS = 1, 24, 36, 38
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_SCOPE_SIGNAL = 2
_CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 29, 31}
"""That root keeps: those of containers, but for device files. With others, such as SYS_ADMIN, it
may read any process's memory whatever Landlock says."""
_SCOPES_SINCE = 6
_STATUS = 125
"""Of a program whose number may be another's."""
_TICK_S = 0.25
_LIBC = ctypes.CDLL(None, use_errno=True)


def can_isolate() -> bool:
    """Return whether this kernel's Landlock knows scopes: Linux 6.12 and later."""
    return int(_LIBC.syscall(_CREATE_RULESET, None, 0, 1)) >= _SCOPES_SINCE


def _isolate() -> None:
    """Keep this process and its descendants from reading, tracing and signalling processes that
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


def _memory() -> int:
    """Return the bytes of all descendants that are in memory."""
    total = 0
    for pid in _descendants("self"):
        with contextlib.suppress(OSError, ValueError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return total * mmap.PAGESIZE


def _holds(pid: int, file: os.stat_result) -> bool:
    """Return whether a process has a file open."""
    with contextlib.suppress(OSError):
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.path.samestat(one.stat(), file):
                    return True
    return False


def _end_children() -> None:
    """Kill all children, also those that become children meanwhile, and wait for them."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in _children("self"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            os.wait()


def _start(settings: dict[str, Any], command: list[str]) -> NoReturn:
    """Turn this process into the program."""
    os.setsid()
    _LIBC.prctl(_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    if "entrance" in settings:
        os.write(settings["entrance"], b"0")
        os.close(settings["entrance"])
    if settings.get("isolated"):
        _isolate()
    os.execvp(command[0], command)


def _wait_for(program: int, limit: int, shared: memoryview | list[int]) -> int | None:
    """Wait for the program and return its exit code; None if it has to be ended, because its parent
    sent SIGTERM or because it took too much memory."""
    while True:
        signals = {signal.SIGTERM, signal.SIGCHLD}
        heard = signal.sigtimedwait(signals, _TICK_S if limit else 1e6)
        if heard is not None and heard.si_signo == signal.SIGTERM:
            return None
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                return os.waitstatus_to_exitcode(ended[1])
        if limit and shared[1] and (taken := _memory()) > limit:
            shared[2] = taken
            return None


def main() -> None:
    """Run the program to its end, and end all that it leaves behind."""
    if sys.argv[1] == "can-isolate":
        sys.exit(not can_isolate())
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    _LIBC.prctl(_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != settings["parent"]:
        return
    program = os.fork()
    if program == 0:
        _start(settings, command)
    output = os.fstat(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for own in (0, 1):  # the program alone reads and writes there
        os.dup2(nothing, own)
    shared: memoryview | list[int] = [0] * len(SHARED)
    if "page" in settings:
        os.close(settings["connection"])
        shared = memoryview(mmap.mmap(settings["page"], mmap.PAGESIZE)).cast("q")
    code = _wait_for(program, settings.get("memory", 0), shared)
    is_printing = settings.get("prints") and code == 0
    others = is_printing and any(_holds(one, output) for one in _descendants("self"))
    _end_children()
    shared[3] = 1
    if others:
        os.write(
            2,
            b"\nWhat this program had started still held its standard output when it ended, so the "
            b"number there may not be its own. Let it end what it starts, or give that another "
            b"output; or report the reward (environment.options.report).\n",
        )
        code = _STATUS
    if code is None:
        code = 128 + signal.SIGTERM
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
