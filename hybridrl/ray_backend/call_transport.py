"""The transport of group calls from the driver to the hosts: three verbs, and the direct way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from hybridrl.controller.group_call import CallResult, RankReply
from hybridrl.ray_backend.call_messages import deserialize_reply, join_header
from hybridrl.ray_backend.ray_import import ray
from hybridrl.ray_backend.remote_result import ResultRefs


class CallEnvelope(NamedTuple):
    """The envelope of a call: what its delivery needs; see `GroupCall` and
    `Worker.runs_beside`."""

    number: int
    role: str
    method: str
    hosts: Sequence[int]
    parts: Sequence[Any]
    returns_batch: bool
    beside: bool = False


class LostReply(NamedTuple):
    """A missing reply: the host died, or Ray could not send what the method returned."""

    text: str
    died: bool


ReplyEvent = tuple[int, int, RankReply | LostReply]
"""The number of a call, a rank of it, and that rank's reply."""


class CallTransport(ABC):
    """A way to the hosts that carries all calls, so that every host runs them in the driver's
    order."""

    @abstractmethod
    def send(self, order: CallEnvelope, body: bytes, results: Sequence[CallResult]) -> Any:
        """Send a call whose request contains these results of other calls, and return what
        `fetch` finds its own result by."""

    @abstractmethod
    def poll(self, numbers: Sequence[int], seconds: float) -> deque[ReplyEvent]:
        """Wait until these calls are done, at most this many seconds, and return the events of all
        calls. The caller removes each event after it has recorded it, so that no event is lost in
        an interrupt; an event may come twice."""

    @abstractmethod
    def fetch(self, data: Any, index: int) -> Any:
        """Return a reference to a shard of a result."""

    def helpers(self) -> list[Any]:
        """Return the actors besides the hosts that end with the job."""
        return []


class DirectTransport(CallTransport):
    """A transport that makes one Ray call per host: the least delay, and a cost to the caller that
    grows with the number of hosts.

    Args:
        actors: The hosts.
        gathers: Whether the replies of a call's ranks are put together on a host, for its readers:
            many ranks that read the replies of many would take long.
    """

    def __init__(self, actors: Sequence[Any], gathers: bool = False) -> None:
        self._actors = actors
        self._gathers = gathers
        self._pending: dict[Any, tuple[int, int]] = {}
        self._replies: dict[int, list[Any]] = {}
        self._events: deque[ReplyEvent] = deque()

    def send(self, order: CallEnvelope, body: bytes, results: Sequence[CallResult]) -> ResultRefs:
        return self.deliver(order, body, [result.data for result in results])

    def deliver(
        self, order: CallEnvelope, body: bytes, references: Sequence[ResultRefs]
    ) -> ResultRefs:
        """Send a call as `send` does, with the references to the results."""
        options: dict[str, Any] = {}
        if references:
            # The same for all: many hosts would take long to be told one by one.
            options["references"] = ray.put(references) if self._gathers else references
        if order.method == "__init__":
            first = self._actors[order.hosts[0]]
            options["rendezvous"] = first.listen.remote(order.role)
        how: dict[str, Any] = {"num_returns": 2} if order.returns_batch else {}
        if order.beside:
            how["concurrency_group"] = "beside"
        replies: list[Any] = []
        shards: list[Any] = []
        for host, part in zip(order.hosts, order.parts, strict=True):
            head = (part, order.role, order.method, order.returns_batch, order.beside)
            run = self._actors[host].run
            if how:
                run = run.options(**how)
            made = run.remote(join_header(head, body), **options)
            shard, reply = made if order.returns_batch else (None, made)
            self._pending[reply] = (order.number, len(replies))
            replies.append(reply)
            shards.append(shard)
        self._replies[order.number] = replies
        if not order.returns_batch:
            return ResultRefs((), ())
        chosen = [rank for rank, part in enumerate(order.parts) if part.answers]
        answers = [replies[rank] for rank in chosen]
        if self._gathers and len(chosen) > 1:
            answers = [self._actors[order.hosts[chosen[0]]].gather.remote(answers)]
        hosts = [order.hosts[rank] for rank in chosen]
        return ResultRefs(answers, [shards[rank] for rank in chosen], hosts)

    def poll(self, numbers: Sequence[int], seconds: float) -> deque[ReplyEvent]:
        wanted = [reply for n in numbers for reply in self._replies.get(n, ())]
        wanted = [reply for reply in wanted if reply in self._pending]
        if wanted:
            # All at once, because each question costs. If some are late or lost, each is looked at.
            with suppress(ray.exceptions.GetTimeoutError, ray.exceptions.RayError):
                self._take(wanted, ray.get(wanted, timeout=seconds))
        if self._pending:
            pending = list(self._pending)
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
            try:
                self._take(ready, ray.get(ready))
            except ray.exceptions.RayError:
                for reply in ready:
                    self._look(reply)
        return self._events

    def fetch(self, data: ResultRefs, index: int) -> Any:
        return data.shards[index]

    def _look(self, reply: Any) -> None:
        try:
            found = ray.get(reply)
        except (ray.exceptions.RayTaskError, ray.exceptions.RaySystemError) as error:
            found = LostReply(str(error), died=False)
        except ray.exceptions.RayError as error:
            found = LostReply(str(error), died=True)
        self._take([reply], [found])

    def _take(self, replies: Sequence[Any], found: Sequence[Any]) -> None:
        for reference, reply in zip(replies, found, strict=True):
            number, rank = self._pending[reference]
            self._events.append((number, rank, deserialize_reply(reply)))
            del self._pending[reference]
            if not any(other in self._pending for other in self._replies.get(number, ())):
                self._replies.pop(number, None)
