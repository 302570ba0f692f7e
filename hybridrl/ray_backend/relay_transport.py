"""The relay, a process that makes the driver's calls: so many hosts cost it no more than few."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from hybridrl.controller.group_call import CallResult
from hybridrl.errors import LostError
from hybridrl.ray_backend.call_messages import (
    deserialize_reply,
    join_header,
    serialize_reply,
    split_header,
)
from hybridrl.ray_backend.call_transport import (
    CallEnvelope,
    CallTransport,
    DirectTransport,
    ReplyEvent,
)
from hybridrl.ray_backend.ray_import import actor_method, ignore_interrupts, ray
from hybridrl.ray_backend.remote_result import ResultRefs

RELAY_TIMEOUT_SECONDS = 60.0
"""The longest time that the relay, which has no other work, may take to answer."""


@ray.remote(
    num_cpus=0, concurrency_groups={"calls": 1, "answers": 4}, max_restarts=0, max_task_retries=0
)
class CallRelay:
    """An actor that makes calls in the order in which they arrive, on one thread, and keeps the
    references to their results; on other threads it waits for replies. It decodes no request, and
    no batch passes through it."""

    def __init__(self) -> None:
        ignore_interrupts()
        self._made: dict[int, ResultRefs] = {}
        self._last = 0  # call that was made
        self._news = threading.Condition()
        self._error: Exception | None = None
        self._polling = threading.Lock()
        self._events: list[ReplyEvent] = []  # that the driver may not have got
        self._told = 0  # events before them

    @actor_method(concurrency_group="calls")
    def connect(self, actors: list[Any]) -> None:
        self._direct = DirectTransport(actors, gathers=True)

    @actor_method(concurrency_group="calls", num_returns=0)
    def send(self, message: bytes, stored: Sequence[ResultRefs] = ()) -> None:
        """Make a call. The header names the results in its request (those of a call by its number,
        those that the driver has stored as None, in their order) and the results that nobody needs
        any more."""
        (order, wanted, unused), body = split_header(message)
        order, of_driver = CallEnvelope(*order), iter(stored)
        try:
            for number in unused:
                del self._made[number]
            found = [next(of_driver) if number is None else self._made[number] for number in wanted]
            self._made[order.number] = self._direct.deliver(order, body, found)
        except Exception as error:  # nobody looks at the result of this method
            self._error = error
            raise
        with self._news:
            self._last = order.number
            self._news.notify_all()

    @actor_method(concurrency_group="answers")
    def poll(self, question: bytes) -> Any:
        """Return events as `CallTransport.poll` does. The message says how many events the
        driver has received, because an answer is lost if the driver is interrupted."""
        (numbers, seconds, got), _ = split_header(question)
        with self._news:
            made = self._news.wait_for(lambda: self._last >= max(numbers, default=0), seconds)
            if not made:
                if self._error is not None:
                    raise self._error
                return serialize_reply((self._told, []), [])
        with self._polling:
            del self._events[: got - self._told]
            self._told = got
            came = self._direct.poll(numbers, seconds)
            self._events += came
            came.clear()
            events = list(self._events)
        return serialize_reply(
            (got, events), [getattr(event[2], "value", None) for event in events]
        )

    @actor_method(concurrency_group="answers")
    def shards(self, number: int) -> Sequence[Any]:
        """Return the references to the batches that a finished call returned."""
        return self._made[number].shards


class RelayedRefs:
    """A stand-in for the result of a call made by the relay; when it is deleted, the relay drops
    the result.

    Attributes:
        shards: References to the batches, when the driver has asked for them.
    """

    def __init__(self, number: int, unused: deque[int]) -> None:
        self.number = number
        self.shards: Sequence[Any] | None = None
        self._unused = unused

    def __del__(self) -> None:
        self._unused.append(self.number)


class RelayTransport(CallTransport):
    """A transport that makes one Ray call per group call. The references to results stay with the
    relay, which puts them into later calls.

    Args:
        actors: The hosts.
        silence_s: How long the relay may take for an answer.
    """

    def __init__(self, actors: Sequence[Any], silence_s: float = RELAY_TIMEOUT_SECONDS) -> None:
        self._silence_s = min(silence_s, RELAY_TIMEOUT_SECONDS)
        # Beside the driver: if their node is lost, so is the job.
        node = ray.get_runtime_context().get_node_id()
        near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=True)
        actor: Any = CallRelay
        self._relay = actor.options(scheduling_strategy=near).remote()
        self._relay.connect.remote(list(actors))
        self._unused: deque[int] = deque()
        self._got = 0
        self._events: deque[ReplyEvent] = deque()

    def send(self, order: CallEnvelope, body: bytes, results: Sequence[CallResult]) -> RelayedRefs:
        data = [result.data for result in results]
        stored = [refs for refs in data if isinstance(refs, ResultRefs)]
        wanted = [None if isinstance(one, ResultRefs) else one.number for one in data]
        unused = [self._unused.popleft() for _ in range(len(self._unused))]
        message = join_header((tuple(order), wanted, unused), body)
        self._relay.send.remote(message, *([stored] if stored else []))
        return RelayedRefs(order.number, self._unused)

    def poll(self, numbers: Sequence[int], seconds: float) -> deque[ReplyEvent]:
        question = join_header((list(numbers), seconds, self._got), b"")
        told, events = deserialize_reply(self._ask(self._relay.poll.remote(question), seconds))
        self._events += events[max(0, self._got - told) :]
        self._got = max(self._got, told + len(events))
        return self._events

    def fetch(self, data: RelayedRefs | ResultRefs, index: int) -> Any:
        if data.shards is None:
            data.shards = self._ask(self._relay.shards.remote(data.number))
        return data.shards[index]

    def helpers(self) -> list[Any]:
        return [self._relay]

    def _ask(self, answer: Any, seconds: float = 0.0) -> Any:
        """Wait for an answer of the relay, this many seconds more than its time limit."""
        try:
            return ray.get(answer, timeout=seconds + self._silence_s)
        except ray.exceptions.GetTimeoutError:
            raise LostError(
                "The relay, the process that passes the driver's calls on to the hosts, did not "
                f"answer within {self._silence_s:g} s: it was stopped, or its node is overloaded."
            ) from None
        except ray.exceptions.RayActorError as error:
            raise LostError(
                "The relay, the process that passes the driver's calls on to the hosts, died: it "
                "was killed from outside (kill -9, the kernel's out-of-memory killer) or its node "
                f"was lost. Start the job again.\n{error}"
            ) from None
