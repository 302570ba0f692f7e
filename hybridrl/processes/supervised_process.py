"""One child process as its pool sees it: starting it, talking to it, ending it."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import mmap
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hybridrl.processes import launcher
from hybridrl.processes.child import Messages, pickle_message
from hybridrl.system.core_pins import PINS
from hybridrl.system.memory_cgroup import make_memory_cgroup

MARK = "HYBRIDRL_PROCESS"
"""A variable that descendants of a process inherit. By it they are found if the launcher, which
finds all, was killed itself."""
_MOST_OUTPUT = 16 << 20
"""Bytes of standard output and errors in a row, without an item that ends."""
_SHOWN_OUTPUT = 1 << 16
"""Of it is passed on."""
_TAIL = 4000
_PIECE = 1 << 18
_ENDING_S = 10.0
_numbers = itertools.count(1)


class ProcessSpec(NamedTuple):
    """The program of a pool's processes, and how to start one.

    Attributes:
        name: What messages call such a process.
        command: The program, which serves items with a `child.ItemServer`.
        setup: Its first message.
        environment: Its variables.
        dumps, loads: Make bytes of a message, and the message again, as its `Messages` do.
        memory: Bytes that it may take with all that it starts; 0: any number.
        keeps_output: Whether what it prints is read here, bounded, and its end kept for messages;
            if not, it goes to the standard error output as it is.
    """

    name: str
    command: Sequence[str]
    setup: Any
    environment: Mapping[str, str]
    dumps: Any = pickle_message
    loads: Any = pickle.loads
    memory: int = 0
    keeps_output: bool = False


class SupervisedProcess:
    """A process and what it has to do.

    Attributes:
        in_flight: Numbers of the items that it has, the oldest first.
        is_blocking: Whether these are blocking items.
        is_ready: Whether it has loaded what it needs.
        is_worn: Whether it should get no further items.
        is_alone: Whether the item in flight is to have the process for itself.
        is_flooded: Whether it wrote more than it may.
        late_since: When an item of it was first seen to take too long, on the monotonic clock.
        has_ended: Whether it is gone, with all that it had started.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self.in_flight: dict[int, None] = {}
        self.is_blocking = self.is_ready = self.is_worn = self.is_alone = False
        self.is_flooded = self.has_ended = self._is_cut = False
        self.started = self.last_answer = time.monotonic()
        self.late_since = math.inf
        self._messages = Messages(spec.dumps, spec.loads)
        self._outgoing = bytearray()
        self._tail, self._written, self._shown, self._kills = bytearray(), 0, 0, 0
        self._mark = f"{os.getpid()}-{next(_numbers)}-{secrets.token_hex(4)}"
        self._group = make_memory_cgroup(spec.memory) if spec.memory else None
        # No pipes: what a program starts may open its parents' pipes in /proc and write there.
        self._socket, theirs = socket.socketpair()
        source, sink = os.pipe() if spec.keeps_output else (-1, 2)
        with tempfile.TemporaryFile() as file, theirs:
            file.truncate(mmap.PAGESIZE)
            self._page = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("q")
            settings = {"parent": os.getpid(), "memory": 0 if self._group else spec.memory}
            shared = {"connection": theirs.fileno(), "page": file.fileno()}
            entrance = {"entrance": self._group.entrance} if self._group else {}
            self._process = subprocess.Popen(
                [
                    *(spec.command[0], "-IS", launcher.__file__),
                    json.dumps({**settings, **shared, **entrance}),
                    *(*spec.command, *map(str, shared.values())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                pass_fds=[*shared.values(), *entrance.values()],
                start_new_session=True,  # Ctrl-C in the terminal does not reach it
                env={**spec.environment, MARK: self._mark},
            )
        PINS.add_child(f"{spec.name}es", self._process.pid)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._output = source
        if source >= 0:
            os.close(sink)
            os.set_blocking(source, False)
        self._socket.setblocking(False)
        self.send(spec.setup)

    @property
    def descriptors(self) -> dict[int, bool]:
        """The descriptors to wait for, and for each whether there is something to write."""
        found = {self._pidfd: False}
        if not self._is_cut:
            found[self._socket.fileno()] = bool(self._outgoing)
        if self._output >= 0 and not self.is_flooded:
            found[self._output] = False
        return found

    def send(self, message: Any) -> None:
        """Send as much as the connection takes now; `flush` sends the rest."""
        self._outgoing += self._messages.pack(message)
        self.flush()

    def flush(self) -> None:
        """Go on sending. A process that has ended is noticed by `receive`, not here."""
        while self._outgoing:
            try:
                del self._outgoing[: self._socket.send(self._outgoing)]
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()

    def receive(self) -> list[Any]:
        """Return the messages that have arrived, without waiting."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        self.has_ended = bool(poll.poll(0))
        self._read_output()
        found: list[Any] = []
        while not self._is_cut:
            try:
                piece = self._socket.recv(_PIECE)
            except BlockingIOError:
                break
            except ConnectionResetError:  # it ended before it had read all
                piece = b""
            self._is_cut = not piece
            found += self._messages.feed(piece)
        if found:
            self._written = 0
        return found

    @property
    def running(self) -> int:
        """The number of the item that has the process; 0: none, or it is not known."""
        return self._page[0]

    @property
    def overdue_s(self) -> float:
        """For how long the running item, or the loop with all items, has gone on for too long."""
        return (time.monotonic_ns() - self._page[1]) / 1e9 if self._page[1] else 0.0

    def was_out_of_memory(self) -> bool:
        """Return whether the memory limit has ended it, or what it started, since the last call."""
        before = self._kills
        self._kills = self._page[2] + (self._group.kills() if self._group else 0)
        return self._kills > before

    def kill(self) -> None:
        """End the process and all that it has started, and wait for it."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        self._process.kill()
        self._process.wait()
        if not self._page[3]:
            _end_all(self._mark)

    def close(self) -> None:
        """End the process and release its descriptors and its memory group."""
        PINS.pools.pop(self._process.pid, None)  # while the number is nobody else's
        self.kill()
        self._socket.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if self._output >= 0:
            os.close(self._output)
            self._output = -1
        if self._group is not None:
            self._group.close()
            self._group = None

    @property
    def was_killed(self) -> bool:
        """True if SIGKILL ended it, which comes from outside. Known only after `kill`."""
        return self._process.returncode == -signal.SIGKILL

    def how_it_ended(self) -> str:
        """Return the meaning of the exit status, as the end of a sentence. Only after `kill`."""
        status = self._process.returncode
        if status < 0:
            name = signal.Signals(-status).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"was killed by {name}{hint}"
        return f"ended with exit status {status}"

    def tail(self) -> str:
        """Return its last output, as lines to put after a sentence."""
        self._read_output()
        text = self._tail.decode("utf-8", "replace").strip()
        return f"\nIt wrote:\n{text}" if text else ""

    def _read_output(self) -> None:
        while self._output >= 0 and not self.is_flooded:
            try:
                piece = os.read(self._output, _PIECE)
            except BlockingIOError:
                return
            if not piece:
                os.close(self._output)
                self._output = -1
            self._tail += piece
            del self._tail[:-_TAIL]
            self._written += len(piece)
            if self._shown < _SHOWN_OUTPUT:
                self._shown += len(piece)
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(piece.decode("utf-8", "replace"))
            self.is_flooded = self._written > _MOST_OUTPUT  # what reads no further stands still


def _end_all(mark: str) -> None:
    """Kill every process that has inherited a mark, whatever group or session it has moved to."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(100):  # they may start others while they are looked for
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
