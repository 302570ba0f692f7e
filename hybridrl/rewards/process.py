"""One reward process as the pool sees it: starting it, talking to it, killing it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from hybridrl.rewards.wire import Unpacker, pack

_READ_SIZE = 1 << 18


class ChildProcess:
    """A reward process, the messages on their way to it, and the tasks it has not answered yet."""

    def __init__(self, setup: tuple[Any, ...], environment: Mapping[str, str]) -> None:
        # A group of its own: killing it takes along what the user's functions have started, and
        # Ctrl-C in the terminal does not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hybridrl.rewards.child", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.stdin = self._process.stdin.fileno()
        self.stdout = self._process.stdout.fileno()
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)
        self._unpacker = Unpacker()
        self._outgoing = bytearray()
        self.ready = False
        self.closed = False  # its end of the pipe is closed: it died
        self.in_flight: dict[int, float] = {}  # task -> when it was sent, oldest first
        self.is_async = False  # kind of the tasks in flight
        self.alone = False  # the task in flight is to have the process for itself
        self.started = self.last_answer = time.monotonic()
        self.send(setup)

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the process group."""
        return self._process.pid

    @property
    def has_outgoing(self) -> bool:
        """Whether part of a message waits for room in the pipe."""
        return bool(self._outgoing)

    def send(self, message: Any) -> None:
        """Sends as much as the pipe takes now; `flush` sends the rest."""
        self._outgoing += pack(message)
        self.flush()

    def flush(self) -> None:
        """Goes on sending. A process that died is noticed by `receive`, not here."""
        while self._outgoing:
            try:
                sent = os.write(self.stdin, self._outgoing)
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()
                return
            del self._outgoing[:sent]

    def receive(self) -> list[Any]:
        """All messages that have arrived, without waiting. Sets `closed` at the end of the pipe."""
        messages: list[Any] = []
        while not self.closed:
            try:
                piece = os.read(self.stdout, _READ_SIZE)
            except BlockingIOError:
                break
            self.closed = not piece
            messages += self._unpacker.feed(piece)
        return messages

    def kill(self) -> None:
        """Kills the process and its process group, and waits for the process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Kills the process and closes the pipes."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it, which comes from outside. Only after `kill`."""
        return self._process.returncode == -signal.SIGKILL

    def how_it_ended(self) -> str:
        """What the exit status says, as the end of a sentence. Only after `kill`."""
        status = self._process.returncode
        if status < 0:
            name = signal.Signals(-status).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"was killed by {name}{hint}"
        return f"ended with exit status {status}"
