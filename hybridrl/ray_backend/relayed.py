"""RelayedCalls: a relay makes the calls, so that many hosts cost the driver no more than few."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hybridrl.controller.envelope import unseal
from hybridrl.controller.host import Reply
from hybridrl.controller.table import Shard
from hybridrl.core.record import Record
from hybridrl.errors import WorkerError
from hybridrl.ray_backend.calls import RETURN_BATCHES, Calls, Order
from hybridrl.ray_backend.library import ray
from hybridrl.ray_backend.message import addressed, pack
from hybridrl.ray_backend.relay import Errand, Relay
from hybridrl.ray_backend.watch import CallsFailedError, Due

SILENCE_SECONDS = 60.0
"""How long the relay, which has nothing else to do, may take for an answer."""


class _Sent:
    """A call that was given to the relay, for as long as anybody may ask for its results.

    Attributes:
        replies: Of all ranks, when they were waited for.
        data: References to the batches of all ranks, when the driver has asked for them.
    """

    def __init__(self, number: int, hosts: int, chapter: int, unused: deque[int]) -> None:
        self.number = number
        self.hosts = hosts
        self.chapter = chapter
        self.replies: list[Reply] | None = None
        self.data: list[Any] | None = None
        self._unused = unused

    def __del__(self) -> None:
        self._unused.append(self.number)


class _Result:
    """Stands for a reference that the relay holds: one rank's batch or its reply."""

    __slots__ = ("is_data", "rank", "sent")

    def __init__(self, sent: _Sent, rank: int, is_data: bool) -> None:
        self.sent = sent
        self.rank = rank
        self.is_data = is_data


class RelayedCalls(Calls):
    """One call of Ray's for each group call. The results' references stay with the relay; in the
    next call, places are kept for them, which the relay fills.

    Args:
        note: Is told of each call that was done, with its chapter.
    """

    def __init__(self, note: Callable[[int, Record], None]) -> None:
        # Beside the driver: if their node is lost, so is the job.
        node = ray.get_runtime_context().get_node_id()
        near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=True)
        self._relay = Relay.options(scheduling_strategy=near).remote()
        self._note = note
        self._number = 0
        self._late: dict[int, _Sent] = {}
        self._unused: deque[int] = deque()

    def connect(self, actors: Sequence[Any]) -> None:
        """Tells the relay the hosts, by number."""
        self._relay.connect.remote(list(actors))

    def _send(self, order: Order, content: Any, chapter: int) -> list[Shard]:
        body, references = pack(content, (ray.ObjectRef, _Result))
        own = [reference for reference in references if not isinstance(reference, _Result)]
        places = {reference: number for number, reference in enumerate(own)}
        wanted = [
            (reference.sent.number, reference.rank, reference.is_data)
            if isinstance(reference, _Result)
            else places[reference]
            for reference in references
        ]
        self._number += 1
        unused = [self._unused.popleft() for _ in range(len(self._unused))]
        errand = Errand(self._number, tuple(order), wanted, unused)
        message = addressed(tuple(errand), body)
        if own:
            self._relay.call.remote(message, own)
        else:
            self._relay.call.remote(message)
        sent = _Sent(self._number, len(order.hosts), chapter, self._unused)
        self._late[sent.number] = sent
        has_data = order.method in RETURN_BATCHES
        return [
            Shard(_Result(sent, rank, True) if has_data else None, _Result(sent, rank, False))
            for rank in range(sent.hosts)
        ]

    def fetch(self, reference: Any) -> Any:
        if not isinstance(reference, _Result):
            return unseal(ray.get(reference))
        sent = reference.sent
        if not reference.is_data:
            return sent.replies[reference.rank]
        if sent.data is None:
            sent.data = self._ask(self._relay.data.remote(sent.number))
        return ray.get(sent.data[reference.rank])

    def late(self, replies: Sequence[Any]) -> bool:
        return bool(_late(replies))

    def until(self, chapter: int) -> list[Any]:
        found = [sent for sent in self._late.values() if sent.chapter <= chapter]
        return [_Result(sent, 0, False) for sent in found]

    def wait(self, replies: Sequence[Any], seconds: float) -> list[Reply] | None:
        if late := _late(replies):
            question = addressed((list(late), seconds), b"")
            answer = self._ask(self._relay.wait.remote(question), seconds)
            if answer is None:
                return None
            if isinstance(answer, tuple):
                raise CallsFailedError(answer)
            found = iter(unseal(answer))
            for number, sent in late.items():
                sent.replies = [next(found) for _ in range(sent.hosts)]
                del self._late[number]
                for reply in sent.replies:
                    self._note(sent.chapter, reply.record)
        return [self.fetch(reply) for reply in replies]

    def due(self) -> list[Due]:
        now = time.monotonic()
        found = self._ask(self._relay.due.remote())
        return [Due(*call)._replace(since=now - call[2]) for call in found]

    def helpers(self) -> list[Any]:
        return [self._relay]

    def _ask(self, answer: Any, seconds: float = 0.0) -> Any:
        """What the relay answers, which may take it so long."""
        try:
            return ray.get(answer, timeout=seconds + SILENCE_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise WorkerError(
                "The relay, the process that passes the driver's calls on to the hosts, did not "
                f"answer within {SILENCE_SECONDS:g} s: it was stopped, or its node is overloaded."
            ) from None
        except ray.exceptions.RayActorError as error:
            raise WorkerError(
                "The relay, the process that passes the driver's calls on to the hosts, died: it "
                "was killed from outside (kill -9, the kernel's out-of-memory killer) or its node "
                f"was lost. Start the job again.\n{error}"
            ) from None


def _late(replies: Sequence[Any]) -> dict[int, _Sent]:
    """The calls, by number, that these belong to and that were not waited for."""
    return {
        reply.sent.number: reply.sent
        for reply in replies
        if isinstance(reply, _Result) and reply.sent.replies is None
    }
