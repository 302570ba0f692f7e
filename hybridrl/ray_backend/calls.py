"""The ways that group calls take from the driver to the hosts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from hybridrl.controller.batch_ref import BatchRef
from hybridrl.controller.host import Call, Place, Reply
from hybridrl.controller.table import Shard
from hybridrl.controller.worker import Context, Worker
from hybridrl.core.batch import Batch
from hybridrl.errors import WorkerError
from hybridrl.ray_backend.library import ray
from hybridrl.ray_backend.message import addressed
from hybridrl.ray_backend.watch import CallsFailedError, Due

RETURN_BATCHES = ("execute", "apply")
"""Methods of `RayHost` that return a batch and a reply, not only a reply."""


class Order(NamedTuple):
    """A call to some hosts: the method of `RayHost`, the head of each one's message, and the call's
    name for people."""

    method: str
    hosts: Sequence[int]
    heads: Sequence[Any]
    name: str


def deliver(
    actors: Sequence[Any], order: Order, body: bytes, references: Sequence[Any]
) -> list[tuple[Any, Any]]:
    """Makes the call; references to the batch, if one is returned, and to the reply of each."""
    options: dict[str, Any] = {"references": list(references)} if references else {}
    if order.method == "create":
        role = order.heads[0].role
        options["rendezvous"] = actors[order.hosts[0]].listen.remote(role)
    made = [
        getattr(actors[host], order.method).remote(addressed(head, body), **options)
        for host, head in zip(order.hosts, order.heads, strict=True)
    ]
    return [tuple(one) if isinstance(one, list) else (None, one) for one in made]


class Calls(ABC):
    """Carries group calls to the hosts, all by one way, so that every host does them in the order
    in which the driver made them."""

    def create(
        self,
        contexts: Sequence[Context],
        worker_class: type[Worker],
        keywords: Mapping[str, Any],
        chapter: int,
    ) -> list[Any]:
        """See `Executor.create`."""
        hosts = [context.host for context in contexts]
        order = Order("create", hosts, contexts, f"{contexts[0].role}.__init__")
        return [shard.reply for shard in self._send(order, (worker_class, dict(keywords)), chapter)]

    def submit(
        self,
        hosts: Sequence[int],
        call: Call,
        places: Sequence[Place],
        returns_batch: bool,
        chapter: int,
    ) -> list[Shard]:
        """See `Executor.submit`."""
        method = "execute" if returns_batch else "answer"
        order = Order(method, hosts, places, f"{call.role}.{call.method}")
        return self._send(order, call, chapter)

    def apply(
        self, host: int, function: Callable[[Batch], Batch], table: BatchRef, chapter: int
    ) -> Shard:
        """See `Executor.submit_apply`."""
        order = Order("apply", [host], [None], "driver.apply")
        return self._send(order, (function, table), chapter)[0]

    def close(self, hosts: Sequence[int], seconds: float) -> None:
        """Lets hosts close their workers when they have done all calls, for `seconds` at most."""
        order = Order("close", hosts, [None] * len(hosts), "close")
        with suppress(CallsFailedError, WorkerError, ray.exceptions.RayError):
            closing = self._send(order, None, 0)
            self.wait([shard.reply for shard in closing], seconds)

    @abstractmethod
    def _send(self, order: Order, content: Any, chapter: int) -> list[Shard]:
        """Makes a call with this content, in which there may be references."""

    @abstractmethod
    def fetch(self, reference: Any) -> Any:
        """See `Executor.fetch`."""

    @abstractmethod
    def late(self, replies: Sequence[Any]) -> bool:
        """Whether some of these calls were not waited for."""

    @abstractmethod
    def until(self, chapter: int) -> list[Any]:
        """The replies up to the end of this chapter that were not waited for."""

    @abstractmethod
    def wait(self, replies: Sequence[Any], seconds: float) -> list[Reply] | None:
        """The replies, or None if some are late.

        Raises:
            CallsFailedError: if a call failed or a host died, among all that are due.
        """

    @abstractmethod
    def due(self) -> list[Due]:
        """What is not known to be done, the oldest first."""

    def helpers(self) -> list[Any]:
        """Actors besides the hosts, which end with the job."""
        return []
