"""DirectCalls: the driver makes the calls itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybridrl.controller.envelope import unseal
from hybridrl.controller.host import Reply
from hybridrl.controller.table import Shard
from hybridrl.core.record import Record
from hybridrl.ray_backend.calls import Calls, Order, deliver
from hybridrl.ray_backend.library import ray
from hybridrl.ray_backend.message import pack
from hybridrl.ray_backend.watch import Due, Watch


class DirectCalls(Calls):
    """One call of Ray's for each host: the least delay, and a cost to the driver that grows with
    the number of hosts.

    Args:
        actors: The hosts.
        note: Is told of each call that was done, with its chapter.
    """

    def __init__(self, actors: Sequence[Any], note: Callable[[int, Record], None]) -> None:
        self._actors = actors
        self._watch = Watch(note)

    def _send(self, order: Order, content: Any, chapter: int) -> list[Shard]:
        body, references = pack(content, (ray.ObjectRef,))
        made = deliver(self._actors, order, body, references)
        for host, (_, reply) in zip(order.hosts, made, strict=True):
            self._watch.add(reply, host, order.name, chapter)
        return [Shard(data, reply) for data, reply in made]

    def fetch(self, reference: Any) -> Any:
        return unseal(ray.get(reference))

    def late(self, replies: Sequence[Any]) -> bool:
        return any(map(self._watch.is_due, replies))

    def until(self, chapter: int) -> list[Any]:
        return [reply for reply, call in self._watch.due().items() if call.chapter <= chapter]

    def wait(self, replies: Sequence[Any], seconds: float) -> list[Reply] | None:
        return self._watch.wait(replies, seconds)

    def due(self) -> list[Due]:
        return list(self._watch.due().values())
