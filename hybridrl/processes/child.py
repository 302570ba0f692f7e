"""The inside of a supervised process: it serves items of work to a `ProcessPool`.

It needs only Python's standard library, for it may run in another Python than the pool's. Messages
go over a socket whose descriptor, like that of the shared page, stands in the command line. First
comes the setup, answered by `["ready", value]` or `["refused", status, text]`. Then come `["items",
[number, is_blocking, limit_s, payload], ...]`, each item answered by `[number, status, value]`, and
`["cancel"]`, which forgets all of them. `["worn"]` tells the pool to give this process no further
items.

Items run in one asyncio loop, blocking ones one after the other in the main thread while the loop
stands still. An item of the loop that takes too long is cancelled and answered for; what blocks
longer is up to the pool, which reads in the shared page whose item has the process.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 18
_TICK_S = 0.25
_WORN_S = 5.0
"""A cancelled item that goes on for so long will not stop."""

_item: contextvars.ContextVar[int] = contextvars.ContextVar("item", default=0)


def pickle_message(message: Any) -> bytes:
    return pickle.dumps(message, protocol=5)


class Messages:
    """Puts messages together from bytes that arrive in pieces of any size, and takes them apart.

    Args:
        dumps, loads: make bytes of a message, and the message again.
    """

    def __init__(
        self,
        dumps: Callable[[Any], bytes] = pickle_message,
        loads: Callable[[bytes], Any] = pickle.loads,
    ) -> None:
        self._dumps, self._loads = dumps, loads
        self._buffer = bytearray()

    def pack(self, message: Any) -> bytes:
        """Return the bytes of one message, its length first."""
        body = self._dumps(message)
        return _LENGTH.pack(len(body)) + body

    def feed(self, piece: bytes) -> list[Any]:
        """Add the next piece and return the messages that it completes."""
        self._buffer += piece
        found, start = [], 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            found.append(self._loads(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        del self._buffer[:start]
        return found


class MarkingEventLoop(asyncio.SelectorEventLoop):
    """A loop that notes in the shared page whose item it runs a step of."""

    def __init__(self, page: memoryview) -> None:
        super().__init__()
        self._page = page

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return super().call_soon(*self._marked(callback, args, context), context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return super().call_at(when, *self._marked(callback, args, context), context=context)

    def _marked(self, callback: Any, args: Any, context: Any) -> Any:
        number = _item.get() if context is None else context.get(_item, 0)
        return (self._run_marked, number, callback, args) if number else (callback, *args)

    def _run_marked(self, number: int, callback: Any, args: Any) -> None:
        self._page[0] = number
        try:
            callback(*args)
        except Exception:
            self._page[0] = 0
            raise
        self._page[0] = 0  # not after sys.exit() in a task, which ends the process


class ItemServer:
    """Runs items by a program and answers for them.

    Args:
        program: `start(setup, server)`, which may be asynchronous and gives what the pool learns of
            it; `run(payload)` for an item, asynchronous; `run_blocking(payload)`; and
            `explain(error)`, the status and the text of what either raised.
        messages: None: they are pickled.
    """

    def __init__(self, program: Any, messages: Messages | None = None) -> None:
        connection, page = map(int, sys.argv[1:3])
        del sys.argv[1:]
        self._socket = socket.socket(fileno=connection)
        os.set_inheritable(connection, False)
        self._page = memoryview(mmap.mmap(page, mmap.PAGESIZE)).cast("q")
        self._program, self._messages = program, messages or Messages()
        self._loop = MarkingEventLoop(self._page)
        self._blocking: deque[tuple[int, float, Any]] = deque()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # Of each item, the seconds that it had the chance to go on, and those that it may have.
        self._ages: dict[int, list[float]] = {}
        self._last_tick = 0.0
        self._ticking: asyncio.TimerHandle | None = None

    def serve(self) -> None:
        """Serve until the pool closes the connection."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's to judge
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        received: list[Any] = []
        while not received:
            received += self._read()
        try:
            ready = self._program.start(received.pop(0), self)
            if inspect.isawaitable(ready):
                ready = self._loop.run_until_complete(ready)
        except BaseException as error:
            self._send(["refused", *self._program.explain(error)])
            return
        self._send(["ready", ready])
        self._loop.add_reader(self._socket.fileno(), lambda: self._take(self._read()))
        self._take(received)
        while True:
            while self._blocking:
                self._run_blocking(*self._blocking.popleft())
            self._loop.run_forever()

    def wear_out(self) -> None:
        """Tell the pool to give this process no further items."""
        self._send(["worn"])

    def _read(self) -> list[Any]:
        piece = self._socket.recv(_PIECE)
        if not piece:  # the pool has closed it, or is gone
            sys.stdout.flush()
            os._exit(0)
        return self._messages.feed(piece)

    def _send(self, message: Any) -> None:
        self._socket.sendall(self._messages.pack(message))

    def _take(self, received: list[Any]) -> None:
        for kind, *items in received:
            if kind == "cancel":
                for number in list(self._tasks):
                    self._stop(number)
            for number, is_blocking, limit_s, payload in items:
                if is_blocking:
                    self._blocking.append((number, limit_s, payload))
                    self._loop.stop()
                    continue
                self._ages[number] = [0.0, limit_s]
                if self._ticking is None:
                    self._last_tick = time.monotonic()
                    self._tick()
                context = contextvars.copy_context()
                context.run(_item.set, number)
                task = context.run(self._loop.create_task, self._run(number, payload))
                self._tasks[number] = task

    def _run_blocking(self, number: int, limit_s: float, payload: Any) -> None:
        self._page[1] = _deadline_ns(limit_s)
        self._page[0] = number
        try:
            answer = ("ok", self._program.run_blocking(payload))
        except BaseException as error:  # sys.exit() in an item ends the item, not the process
            answer = self._program.explain(error)
        self._page[0] = self._page[1] = 0
        self._send((number, *answer))

    async def _run(self, number: int, payload: Any) -> None:
        try:
            answer = ("ok", await self._program.run(payload))
        except asyncio.CancelledError as error:
            if number not in self._ages:
                return
            answer = self._program.explain(error)  # nobody here has cancelled it: its own code has
        except GeneratorExit:  # the process ends
            raise
        except BaseException as error:
            answer = self._program.explain(error)
        finally:
            self._tasks.pop(number, None)
        self._answer(number, *answer)

    def _answer(self, number: int, status: str, value: Any) -> None:
        if self._ages.pop(number, None) is None:
            return  # it was given up before
        self._send((number, status, value))

    def _stop(self, number: int) -> None:
        """Cancel an item that nobody waits for any more."""
        self._ages.pop(number, None)
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()
            self._loop.call_later(_WORN_S, self._look_after, task)

    def _look_after(self, task: asyncio.Task[None]) -> None:
        if not task.done():
            self.wear_out()

    def _tick(self) -> None:
        """Age the items, and note that none of them blocks the loop. Time in which one has is not
        counted."""
        now = time.monotonic()
        passed, self._last_tick = min(now - self._last_tick, 2 * _TICK_S), now
        for number, age in list(self._ages.items()):
            age[0] += passed
            if age[0] > age[1]:
                self._answer(number, "timeout", None)
                self._stop(number)
        limits = [limit for _, limit in self._ages.values()]
        pause = min([_TICK_S, *(limit / 4 for limit in limits)])
        self._page[1] = _deadline_ns(max(limits, default=math.inf) + 2 * pause)
        self._ticking = self._loop.call_later(pause, self._tick) if limits else None


def _deadline_ns(limit_s: float) -> int:
    return 0 if limit_s == math.inf else time.monotonic_ns() + int(limit_s * 1e9)


def traceback_of(error: BaseException, own: Collection[str]) -> str:
    """Return an error with its traceback, without the first frames if they are in these files."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename in own:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).strip()
