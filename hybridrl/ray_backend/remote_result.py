"""RemoteResult: what another call returned, as a host sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hybridrl.batch.batch import Batch
from hybridrl.controller.group_call import (
    ExpectedColumns,
    Rows,
    ShardedResult,
    ShardInfo,
    UpstreamError,
)
from hybridrl.ray_backend.call_messages import deserialize_reply
from hybridrl.ray_backend.ray_import import ray

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 2.0, 60.0


class ResultRefs(NamedTuple):
    """Ray's references to the result of a call.

    Attributes:
        replies: Of the ranks that answered, or one to all of them together.
        shards: Batches of the ranks that answered.
        hosts: Where each is; empty: with the driver.
    """

    replies: Sequence[Any]
    shards: Sequence[Any]
    hosts: Sequence[int] = ()


class HostLocality(NamedTuple):
    """The node of each host, to decide what has to travel between nodes.

    Attributes:
        actors, nodes: Of each host; empty if there is one node only.
        here: This host's node.
    """

    actors: Sequence[Any] = ()
    nodes: Sequence[str] = ()
    here: str = ""

    def asks(self, host: int, wanted: float, whole: float) -> bool:
        """Return whether to request only the needed bytes of a shard from its host: it is on
        another node, and less would travel than if this node fetched the whole shard once for all
        its hosts."""
        if not self.nodes or self.nodes[host] == self.here:
            return False
        return wanted * max(1, self.nodes.count(self.here)) < whole


def get_borrowed(references: Sequence[Any]) -> list[Any]:
    """Return the objects of references that came within a message, however long that takes.

    Where two threads of a process are sent the same reference, Ray can forget an object while one
    of them waits for it (seen in 2.60, once in ten thousand calls): the thread that is done with
    the object deletes the copy that has just come for the other, and no second one is sent. So
    what is late is asked for again. Reading a reference anew does that.
    """
    wait = FIRST_WAIT_SECONDS
    while True:
        try:
            found: list[Any] = ray.get(list(references), timeout=wait)
            return found
        except ray.exceptions.GetTimeoutError:
            references = ray.get(ray.put(list(references)))
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)


class RemoteResult(ShardedResult):
    """The result of another call. The descriptions of its shards are fetched once; of its rows only
    those that are read.

    Args:
        refs: Where it is.
        around: The hosts of the job.
    """

    def __init__(
        self, refs: ResultRefs, columns: ExpectedColumns, rows: int | None, around: HostLocality
    ) -> None:
        super().__init__(columns, rows)
        self._refs = refs
        self._around = around
        self._infos: list[ShardInfo] | None = None

    def infos(self) -> Sequence[ShardInfo]:
        if self._infos is None:
            self._infos = []
            for found in map(deserialize_reply, get_borrowed(self._refs.replies)):
                for reply in found if isinstance(found, list) else [found]:
                    if reply.failure is not None:
                        raise UpstreamError(reply.failure)
                    self._infos.append(reply.info)
        return self._infos

    def batch(self, index: int) -> Batch:
        batch: Batch = get_borrowed([self._refs.shards[index]])[0]
        return batch

    def read(self, index: int, rows: Rows, names: Sequence[str]) -> Batch:
        info = self.infos()[index]
        wanted, whole = info.bytes_of(len(rows), names), float(sum(info.sizes))
        if self._refs.hosts and self._around.asks(host := self._refs.hosts[index], wanted, whole):
            shard = [self._refs.shards[index]]  # in a list, or Ray would bring it here
            asked = self._around.actors[host].rows.remote(shard, rows, list(names))
            batch: Batch = ray.get(asked)
            return batch
        return super().read(index, rows, names)
