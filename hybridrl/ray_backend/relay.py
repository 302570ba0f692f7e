"""Relay: the Ray actor that makes the driver's calls to many hosts. Importing this needs Ray."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from hybridrl.controller.envelope import seal_all
from hybridrl.controller.failures import Death
from hybridrl.controller.host import Failure, Reply
from hybridrl.ray_backend.calls import Order, deliver
from hybridrl.ray_backend.library import ray
from hybridrl.ray_backend.message import open_head
from hybridrl.ray_backend.watch import CallsFailedError, Due, Watch


class Errand(NamedTuple):
    """What the driver gives to the relay with the body of a call.

    Attributes:
        number: Of the call.
        references: What belongs into the body: `(call, rank, is_data)` for a result of an earlier
            call; a number for one of the references that come with the errand.
        unused: Numbers of calls whose results nobody will ask for any more.
    """

    number: int
    order: Order
    references: Sequence[tuple[int, int, bool] | int]
    unused: Sequence[int]


@ray.remote(
    num_cpus=0, concurrency_groups={"calls": 1, "answers": 4}, max_restarts=0, max_task_retries=0
)
class Relay:
    """Makes calls in the order in which they come, on one thread, and keeps the references to their
    results; on others it waits for replies. It opens no message, and no batch passes through it."""

    def __init__(self) -> None:
        # Ctrl-C in a terminal reaches every process of the job; only the driver decides.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._actors: list[Any] = []
        self._watch = Watch(lambda chapter, record: None)
        self._made: dict[int, list[tuple[Any, Any]]] = {}
        self._news = threading.Condition()
        self._error: Exception | None = None

    @ray.method(concurrency_group="calls")
    def connect(self, actors: list[Any]) -> None:
        self._actors = actors

    @ray.method(concurrency_group="calls", num_returns=0)
    def call(self, message: bytes, references: Sequence[Any] = ()) -> None:
        try:
            number, made = self._make(message, references)
        except Exception as error:  # nobody looks at the result of this method
            self._error = error
            raise
        with self._news:
            self._made[number] = made
            self._news.notify_all()

    def _make(self, message: bytes, references: Sequence[Any]) -> tuple[int, list[tuple[Any, Any]]]:
        errand, body = open_head(message)
        number, order, wanted, unused = errand
        order = Order(*order)
        for old in unused:
            del self._made[old]
        found = [self._find(reference, references) for reference in wanted]
        made = deliver(self._actors, order, body, found)
        for host, (_, reply) in zip(order.hosts, made, strict=True):
            self._watch.add(reply, host, order.name, 0)
        return number, made

    def _find(self, reference: tuple[int, int, bool] | int, references: Sequence[Any]) -> Any:
        if isinstance(reference, int):
            return references[reference]
        number, rank, is_data = reference
        data, reply = self._made[number][rank]
        return data if is_data else reply

    @ray.method(concurrency_group="answers")
    def wait(self, question: bytes) -> list[Reply] | bytes | tuple[Failure | Death, ...] | None:
        """The replies of all ranks to some calls, call by call; None if some are late after so many
        seconds; what went wrong as a tuple."""
        (numbers, seconds), _ = open_head(question)
        until = time.monotonic() + seconds
        with self._news:
            if not self._news.wait_for(lambda: self._made.keys() >= set(numbers), seconds):
                if self._error is not None:
                    raise self._error
                return None
            replies = [reply for number in numbers for _, reply in self._made[number]]
        try:
            found = self._watch.wait(replies, max(0.0, until - time.monotonic()))
        except CallsFailedError as error:
            return tuple(error.found)
        return None if found is None else seal_all(found)

    @ray.method(concurrency_group="answers")
    def data(self, number: int) -> list[Any]:
        """The references to the batches that a call returned, by rank. It has been waited for."""
        return [data for data, _ in self._made[number]]

    @ray.method(concurrency_group="answers")
    def due(self) -> list[Due]:
        """What is not known to be done, the oldest first; the time is how long ago it began."""
        now = time.monotonic()
        return [call._replace(since=now - call.since) for call in self._watch.due().values()]
