"""One environment process as the pool sees it: starting it, talking to it, ending it."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.environments.shim import LOOPBACK, MARK, end_all, with_direct_access
from hybridrl.system.memory_cgroup import memory_group

_LAST_WORDS_S = 5.0
"""How long to read what an ended process wrote."""
_MOST_OUTPUT = 16 << 20
"""Bytes of standard output and errors in a row, without an episode that ends."""
_SHOWN_OUTPUT = 1 << 16
"""Of it is passed on."""
_TAIL = 4000
_PIECE = 1 << 16
_numbers = itertools.count(1)


class EnvironmentProcess:
    """A process that plays episodes.

    Args:
        python: Its interpreter.
        setup: What it is told first.
        memory: Most bytes that it may take, with what it starts.
        environment: Its variables.
        news: Gets the process whenever it has said something, or has ended.

    Attributes:
        messages: What it has said.
        in_flight: Numbers of the episodes that it plays, and when they were given to it.
        is_ready: Whether it has loaded its environment.
        is_worn: Whether it should get no further episodes.
        is_alone: Whether the episode in flight is to have the process for itself.
        is_flooded: Whether it wrote more than it may; it has then stopped.
        has_ended: Whether its pipes are closed.
        last_word: When it last said anything, on the monotonic clock.
    """

    def __init__(
        self,
        python: str,
        setup: Mapping[str, Any],
        memory: int,
        environment: Mapping[str, str],
        news: queue.SimpleQueue[EnvironmentProcess],
    ) -> None:
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.in_flight: dict[int, float] = {}
        self.is_ready = self.is_worn = self.is_alone = False
        self.is_flooded = self.has_ended = False
        self.started = self.last_word = time.monotonic()
        self.ending: dict[str, Any] = {}
        self._news = news
        self._tail = bytearray()
        self._written = self._kills = 0
        self._mark = f"{os.getpid()}-{next(_numbers)}-{secrets.token_hex(4)}"
        self._group = memory_group(memory)
        entrance = -1 if self._group is None else self._group.entrance
        # No pipes: what an environment starts may open its parents' pipes in /proc and write there.
        own, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as file, theirs:
            file.truncate(mmap.PAGESIZE)
            self._marker = mmap.mmap(file.fileno(), mmap.PAGESIZE)
            kept = [file.fileno(), *([] if entrance < 0 else [entrance])]
            self._process = subprocess.Popen(
                [python, str(Path(__file__).with_name("shim.py")), *map(str, (kept[0], entrance))],
                stdin=theirs,
                stdout=theirs,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=kept,
                start_new_session=True,  # Ctrl-C in the terminal does not reach it
                env={**with_direct_access(environment, *LOOPBACK), MARK: self._mark},
            )
        self._socket = own
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._errors.start()
        for program in (self._send, self._receive):
            threading.Thread(target=program, daemon=True).start()
        self.send({**setup, "memory": memory if self._group is None else 0})

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message; never waits."""
        self._outgoing.put(json.dumps(message, default=_plain).encode() + b"\n")

    def running(self) -> int:
        """The number of the episode that had the process when it ended; 0: none, or not known."""
        return int.from_bytes(self._marker[:8], sys.byteorder)

    def was_out_of_memory(self) -> bool:
        """Whether the limit of its memory has ended it, or what it started, since this was asked
        last."""
        before, self._kills = self._kills, 0 if self._group is None else self._group.kills()
        return self._kills > before

    def kill(self) -> None:
        """Ends the process and all that it has started, and waits for it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        end_all(self._mark)
        self._process.wait()

    def close(self) -> None:
        """Ends the process and lets go of what it took."""
        self.kill()
        self._outgoing.put(None)
        if self._group is not None:
            self._group.close()
            self._group = None

    def how_it_ended(self) -> str:
        """What the exit status says, as the end of a sentence. Only after `kill`."""
        status = self._process.returncode
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with exit status {status}"

    def tail(self) -> str:
        """What it wrote last, as lines to put after a sentence. Only after `kill`."""
        self._errors.join(_LAST_WORDS_S)  # what has ended may not have been read to its end
        text = self._tail.decode("utf-8", "replace").strip()
        return f"\nIt wrote:\n{text}" if text else ""

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # that it has ended, `_receive` notices
            while (data := self._outgoing.get()) is not None:
                self._socket.sendall(data)
            self._socket.shutdown(socket.SHUT_WR)

    def _receive(self) -> None:
        buffer = bytearray()
        while piece := self._read_socket():
            self.last_word = time.monotonic()
            buffer += piece
            *lines, rest = bytes(buffer).split(b"\n")
            buffer = bytearray(rest)
            for line in lines:
                with contextlib.suppress(ValueError):  # not ours: somebody wrote to our pipe
                    self._take(json.loads(line))
        self._socket.close()
        self.has_ended = True
        self._news.put(self)

    def _read_socket(self) -> bytes:
        try:
            return self._socket.recv(_PIECE)
        except ConnectionResetError:  # it ended before it had read all
            return b""

    def _take(self, message: dict[str, Any]) -> None:
        if "ending" in message:
            self.ending = message
        elif "alive" not in message:
            if "done" in message:
                self._written = 0
            self.messages.put(message)
            self._news.put(self)

    def _read_errors(self) -> None:
        pipe = self._process.stderr
        assert pipe is not None
        shown = 0
        while piece := os.read(pipe.fileno(), _PIECE):
            self._tail += piece
            del self._tail[:-_TAIL]
            self._written += len(piece)
            if shown < _SHOWN_OUTPUT:
                shown += len(piece)
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(piece.decode("utf-8", "replace"))
            if self._written > _MOST_OUTPUT:
                self.is_flooded = True  # and is not read any further, so that it stands still
                self._news.put(self)
                return
        pipe.close()


def _plain(value: Any) -> Any:
    """A value of a row that JSON does not know."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value)
