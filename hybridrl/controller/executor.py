"""Executor: where hosts live and how the driver reaches them.

Two exist: `RayExecutor` (one process per device, any number of nodes) and `InlineExecutor` (one
host in the driver's own process, no Ray, so that `pdb` and profilers work).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridrl.controller.batch_ref import BatchRef
from hybridrl.controller.host import Call, Place, Reply
from hybridrl.controller.table import Part, Shard, ShardInfo, Table
from hybridrl.controller.worker import Context, Worker
from hybridrl.core.batch import Batch
from hybridrl.core.cluster import Cluster
from hybridrl.core.record import Record


class Executor(ABC):
    """Runs calls on hosts.

    Calls belong to chapters, such as the steps of a training run, of which several may be under way
    at a time.

    Attributes:
        cluster: The devices, one host each.
        chapter: The number of the one that calls belong to now.
    """

    cluster: Cluster
    run_directory: Path | None

    def __init__(self) -> None:
        self.chapter = 0
        self._records: dict[int, list[Record]] = defaultdict(list)

    @abstractmethod
    def create(
        self, contexts: Sequence[Context], worker_class: type[Worker], keywords: Mapping[str, Any]
    ) -> list[Any]:
        """Builds a group: a worker on the host of each context, in rank order. Returns references
        to the replies."""

    @abstractmethod
    def submit(
        self, hosts: Sequence[int], call: Call, places: Sequence[Place], returns_batch: bool
    ) -> list[Shard]:
        """Queues a group call on these hosts, in rank order; the shards have data only if the
        method returns a batch. Calls that are queued later run later on every host."""

    @abstractmethod
    def submit_apply(self, host: int, function: Callable[[Batch], Batch], table: BatchRef) -> Shard:
        """Queues a pure function on a host."""

    @abstractmethod
    def store(self, value: Any) -> Any:
        """Puts an object where hosts can fetch it; returns its reference."""

    @abstractmethod
    def fetch(self, reference: Any) -> Any:
        """The object behind a reference that has been waited for."""

    @abstractmethod
    def wait(self, replies: Sequence[Any], limit: float | None = None) -> list[Reply] | None:
        """Waits until these calls are done, for `limit` seconds at most: their replies, or None
        if some are late.

        Raises:
            WorkerError: if any call failed or any host died meanwhile.
            CallTimeoutError: if a call ran longer than the deadline.
        """

    @abstractmethod
    def settle(self, chapter: int) -> None:
        """Waits until every call up to the end of this chapter is done; raises as `wait` does."""

    @abstractmethod
    def close(self) -> None:
        """Ends all hosts."""

    def put(self, batch: Batch) -> BatchRef:
        """Hands a batch of the driver's to the workers. It is stored once."""
        info = ShardInfo.of(batch, np.arange(len(batch)))
        reply = self.store(Reply(Record("driver", 0, "put"), info=info))
        return BatchRef(Table((Shard(self.store(batch), reply),)), self)

    def apply(self, function: Callable[[Batch], Batch], table: BatchRef) -> BatchRef:
        """See `BatchRef.apply`."""
        return BatchRef(Table((self.submit_apply(0, function, table),)), self)

    def collect(self, table: BatchRef) -> Batch:
        """See `BatchRef.collect`."""
        self.wait([shard.reply for shard in table.node.shards()])
        return table.read(Part(0, 1, "rows"), self.fetch)[0]

    def end_chapter(self) -> int:
        """Calls made from now on belong to the next chapter; gives the number of this one."""
        self.chapter += 1
        return self.chapter - 1

    def take_records(self, chapter: int | None = None) -> list[Record]:
        """Waits for every call up to the end of this chapter (None: the current one); what the
        ranks did in those whose records were not taken before."""
        chapter = self.chapter if chapter is None else chapter
        self.settle(chapter)
        done = sorted(number for number in self._records if number <= chapter)
        return [record for number in done for record in self._records.pop(number)]

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
