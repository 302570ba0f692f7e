"""ProcessPool: runs items in supervised child processes, and outlives whatever happens in them."""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybridrl.processes.supervised_process import ProcessSpec, SupervisedProcess

_log = logging.getLogger(__name__)

_CHUNK_S = 0.01  # a process has about this much blocking work ahead of it, so that it never waits
_LARGEST_CHUNK = 64
_TICK_S = 0.25


class WorkItem(NamedTuple):
    """An item of work for a process.

    Attributes:
        key: Comes back with the result.
        payload: Builds what the program gets from the number of times that it was given before.
        limit_s: Seconds that it may take.
        is_blocking: Whether it runs in the main thread of its process, while nothing else does.
    """

    key: int
    payload: Callable[[int], Any]
    limit_s: float
    is_blocking: bool = False


class ItemResult(NamedTuple):
    """The result of an item.

    Attributes:
        status: `ok`, what the program says of its failures, or, after the loss of its process,
            `crash`, `timeout`, `memory` or `output`. An item that timed out has `timeout`, too.
        value: The program's answer, if there is one.
        loss: How its process ended, as the end of a sentence; None if it has not.
        tail: The last output of that process.
        is_guilty: Whether the item had the process; if not, it has lost too many to others.
        attempt: Number of times that the item was given to a process before.
    """

    key: int
    status: str
    value: Any = None
    loss: str | None = None
    tail: str = ""
    is_guilty: bool = True
    attempt: int = 0


class ProcessStartError(Exception):
    """A process cannot load its program. The message is the program's, or how the process ended.

    Attributes:
        status: Of the program; `ended` or `late` if it gave none.
        tail: What the process wrote last.
    """

    def __init__(self, message: str, status: str, tail: str = "") -> None:
        super().__init__(message)
        self.status, self.tail = status, tail


@dataclass
class _Item:
    work: WorkItem
    attempt: int = 0
    was_killed: bool = False  # with its process, from outside


class ProcessPool:
    """Processes of one kind, and the items that wait for them.

    An item that raises, hangs, floods or kills its process costs itself and no other. A lost
    process is replaced. The item that had it fails; if it was killed from outside, when nobody
    knows that the item was the reason, it is tried once more. The others are given to processes
    again; where nobody knows which item had the process, each is then run alone, to find out.

    Methods may be called from several threads, but `poll` from one at a time.

    Args:
        most: Number of processes.
        at_once: Items in a process, of those that do not block.
        most_losses: An item whose process is lost so often, by others, fails.
    """

    def __init__(
        self, spec: ProcessSpec, most: int, at_once: int, most_losses: float = math.inf
    ) -> None:
        self._spec, self._most, self._at_once, self._most_losses = spec, most, at_once, most_losses
        self._lock = threading.RLock()
        self._count = 0
        self._items: dict[int, _Item] = {}
        self._waiting: dict[bool, deque[int]] = {False: deque(), True: deque()}
        self._suspects: deque[int] = deque()
        self._results: list[ItemResult] = []
        self._seconds_per_item = math.inf
        self._start_s = math.inf
        self._readiness: list[Any] = []
        self._processes: list[SupervisedProcess] = []
        self._wakened, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        pipe = (self._wakened, self._waker)
        self._finalizer = weakref.finalize(self, _close_all, self._processes, pipe, os.getpid())

    def start(self, count: int) -> None:
        """Start processes until there are `count`; do not wait for them."""
        with self._lock:
            while len(self._processes) < count:
                self._processes.append(SupervisedProcess(self._spec))

    def wait_until_ready(self, within_s: float, *, of: Callable[..., bool] = all) -> Any:
        """Wait for all processes, or for `any`, and return what a program has said of itself.

        Raises:
            ProcessStartError: if one cannot load its program, or not in that time. The pool is
                closed then.
        """
        self._start_s = within_s
        while not of(process.is_ready for process in self._processes):
            self._wait(math.inf)
        return self._readiness[0]

    def submit(self, items: Iterable[WorkItem]) -> None:
        """Queue items; never blocks."""
        with self._lock:
            for item in items:
                self._count += 1
                self._items[self._count] = _Item(item)
                self._waiting[item.is_blocking].append(self._count)
            if not self.is_closed:
                os.write(self._waker, b" ")

    def poll(self, wait_s: float = 0.0) -> list[ItemResult]:
        """Return the items that have ended since the last call.

        Args:
            wait_s: Seconds to wait for one, if there is none.

        Raises:
            ProcessStartError: if a program cannot be loaded.
        """
        until = time.monotonic() + wait_s
        while True:
            self._wait(0.0)
            with self._lock:
                if self._results or time.monotonic() >= until or self.is_closed:
                    found, self._results = self._results, []
                    return found
            self._wait(until)

    def cancel(self) -> None:
        """Drop all items. A process in which a blocking one runs is replaced."""
        with self._lock:
            self._items.clear()
            self._suspects.clear()
            self._results.clear()
            for waiting in self._waiting.values():
                waiting.clear()
            for process in [one for one in self._processes if one.in_flight]:
                process.in_flight.clear()
                process.is_alone = False
                if process.is_blocking:
                    self._replace(process)
                else:
                    process.send(["cancel"])

    @property
    def is_closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """End all processes and what they have started. A closed pool cannot be used again."""
        with self._lock:
            if not self.is_closed:
                os.write(self._waker, b" ")
            self._finalizer()

    def _wait(self, until: float) -> None:
        """Dispatch items, wait for an event or a deadline, and take what has arrived."""
        with self._lock:
            if self.is_closed:
                return
            self._dispatch()
            poll = select.poll()
            poll.register(self._wakened, select.POLLIN)
            for process in self._processes:
                for descriptor, has_outgoing in process.descriptors.items():
                    poll.register(descriptor, select.POLLIN | (select.POLLOUT * has_outgoing))
                if not process.is_ready:
                    until = min(until, process.started + self._start_s)
                elif process.in_flight:  # looked at when it becomes late, and again soon after
                    late = process.overdue_s
                    pause = _TICK_S / 2 if late > 0 else min(_TICK_S, -late or _TICK_S)
                    until = min(until, time.monotonic() + pause)
        wait_s = max(0.0, until - time.monotonic())
        active = {one for one, _ in poll.poll(math.ceil(min(wait_s, 1e6) * 1000))}
        with self._lock:
            if self.is_closed:
                return
            if self._wakened in active:
                os.read(self._wakened, 1 << 16)
            for process in list(self._processes):
                self._look_after(process, not active.isdisjoint(process.descriptors))

    def _dispatch(self) -> None:
        wanted = sum(map(len, self._waiting.values())) + len(self._suspects)
        if wanted:
            self.start(self._most)
        for process in sorted(self._processes, key=lambda one: len(one.in_flight)):
            if not process.is_ready or process.is_alone or process.has_ended:
                continue
            if not process.in_flight:
                if process.is_worn:
                    self._replace(process)
                    continue
                process.last_answer = time.monotonic()
                process.is_blocking = bool(self._waiting[True])
                if not process.is_blocking and not self._waiting[False] and self._suspects:
                    process.is_alone = True
                    self._give(process, [self._suspects.popleft()])
                    continue
            waiting = self._waiting[process.is_blocking]
            fair = math.ceil(len(waiting) / len(self._processes))
            room = 0 if process.is_worn else self._room(process)
            self._give(process, [waiting.popleft() for _ in range(min(room, fair))])

    def _room(self, process: SupervisedProcess) -> int:
        """Return how many more items the process should have."""
        count = len(process.in_flight)
        if not process.is_blocking:
            return self._at_once - count
        ahead = min(_LARGEST_CHUNK, max(1, int(_CHUNK_S / max(self._seconds_per_item, 1e-9))))
        return ahead - count if count <= ahead // 2 else 0

    def _give(self, process: SupervisedProcess, numbers: list[int]) -> None:
        if not numbers:
            return
        message: list[Any] = ["items"]
        for number in numbers:
            work, attempt = self._items[number].work, self._items[number].attempt
            payload = work.payload(attempt)
            message.append([number, work.is_blocking, work.limit_s, payload])
        process.in_flight |= dict.fromkeys(numbers)
        process.send(message)

    def _look_after(self, process: SupervisedProcess, is_active: bool) -> None:
        now = time.monotonic()
        if is_active:
            process.flush()
            self._take(process, process.receive())
        is_late = bool(process.in_flight) and process.overdue_s > 0
        # For a while: if all processes stood still, this one can show first that it goes on.
        process.late_since = min(process.late_since, now) if is_late else math.inf
        if process.is_flooded:
            self._bury(process, "output", "wrote more than 16 MiB and was stopped")
        elif process.has_ended:
            process.kill()
            is_full = process.was_out_of_memory()
            self._bury(process, "memory" if is_full else "crash", process.how_it_ended())
        elif now - process.late_since > _TICK_S / 2:
            self._bury(process, "timeout", "was stopped")
        elif not process.is_ready and now - process.started > self._start_s:
            self.close()
            raise ProcessStartError("", "late", process.tail())

    def _take(self, process: SupervisedProcess, messages: list[Any]) -> None:
        now, answered = time.monotonic(), 0
        for kind, *content in messages:
            if kind == "refused":
                self.close()
                raise ProcessStartError(content[1], content[0])
            if kind == "ready":
                process.is_ready = True
                self._readiness = content
            elif kind == "worn":
                process.is_worn = True
            elif kind in process.in_flight:
                answered += 1
                del process.in_flight[kind]
                item, (status, value) = self._items.pop(kind), content
                if status == "error" and process.was_out_of_memory():
                    status = "memory"  # of a program that it had started
                found = ItemResult(item.work.key, status, value, attempt=item.attempt)
                self._results.append(found)
        process.is_alone = process.is_alone and bool(process.in_flight)
        if answered and process.is_blocking:
            seconds, known = (now - process.last_answer) / answered, self._seconds_per_item
            self._seconds_per_item = (known + seconds) / 2 if math.isfinite(known) else seconds
            process.last_answer = now

    def _bury(self, process: SupervisedProcess, status: str, end: str) -> None:
        """Replace a process, and find out which of its items is to blame."""
        running = process.running
        process.kill()
        self._take(process, process.receive())  # the item may have ended just before
        tail = process.tail()
        if not process.is_ready:
            self.close()
            raise ProcessStartError(end, "ended", tail)
        numbers, was_killed = list(process.in_flight), process.was_killed and status == "crash"
        process.in_flight.clear()
        self._replace(process)
        if not numbers:
            _log.warning("An idle %s %s; it is replaced.", self._spec.name, end)
            return
        if running in numbers:
            guilty = running
        elif process.is_blocking:  # they run in order
            guilty = 0 if running else numbers[0]
        else:
            guilty = 0 if len(numbers) > 1 else numbers[0]
        again: list[int] = []
        for number in numbers:
            item = self._items[number]
            if number == guilty and was_killed and not item.was_killed:
                item.was_killed = True
            elif number == guilty or item.attempt + 1 >= self._most_losses:
                del self._items[number]
                key, is_guilty = item.work.key, number == guilty
                found = ItemResult(key, status, None, end, tail, is_guilty, item.attempt)
                self._results.append(found)
                continue
            item.attempt += 1
            again.append(number)
        if guilty or process.is_blocking:
            self._waiting[process.is_blocking].extendleft(reversed(again))
        else:
            self._suspects.extend(again)
        _log.info("A %s %s; it had %d other items.", self._spec.name, end, len(again))

    def _replace(self, process: SupervisedProcess) -> None:
        process.close()
        self._processes.remove(process)
        self.start(len(self._processes) + 1)


def _close_all(processes: list[SupervisedProcess], pipe: tuple[int, int], owner: int) -> None:
    """End the processes, unless this process is a fork of their owner."""
    if os.getpid() == owner:
        for process in processes:
            process.close()
        for end in pipe:
            os.close(end)
    processes.clear()
