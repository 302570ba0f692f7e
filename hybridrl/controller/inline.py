"""InlineExecutor: one host in the driver's own process. No Ray: `pdb` and profilers just work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hybridrl.controller.batch_ref import BatchRef
from hybridrl.controller.executor import Executor
from hybridrl.controller.host import Call, Host, Place, Reply
from hybridrl.controller.table import Shard
from hybridrl.controller.worker import Context, Worker
from hybridrl.core.batch import Batch
from hybridrl.core.cluster import Cluster, Device, choose_devices


class InlineExecutor(Executor):
    """Runs every call at once, where it is made. A reference is the object itself.

    Exceptions of workers reach the driver as they are.
    """

    def __init__(self, devices: str = "auto", run_directory: Path | None = None) -> None:
        super().__init__()
        kind, _ = choose_devices(devices, 1, torch.accelerator.device_count(), 1)
        self.cluster = Cluster([Device(kind, "localhost", 0)])
        self.run_directory = run_directory
        self._host = Host(self.fetch, raises=True, redirects=False)

    def create(
        self, contexts: Sequence[Context], worker_class: type[Worker], keywords: Mapping[str, Any]
    ) -> list[Reply]:
        (context,) = contexts
        reply = self._host.create(context, worker_class, keywords)
        self._records[self.chapter].append(reply.record)
        return [reply]

    def submit(
        self, hosts: Sequence[int], call: Call, places: Sequence[Place], returns_batch: bool
    ) -> list[Shard]:
        (place,) = places
        return [self._done(*self._host.execute(call, place))]

    def submit_apply(self, host: int, function: Callable[[Batch], Batch], table: BatchRef) -> Shard:
        return self._done(*self._host.apply(function, table))

    def store(self, value: Any) -> Any:
        return value

    def fetch(self, reference: Any) -> Any:
        return reference

    def wait(self, replies: Sequence[Any], limit: float | None = None) -> list[Reply] | None:
        return list(replies)  # every call is done when it returns

    def settle(self, chapter: int) -> None:
        """Nothing to wait for: every call is done when it returns."""

    def close(self) -> None:
        self._host.close()

    def _done(self, batch: Batch | None, reply: Reply) -> Shard:
        self._records[self.chapter].append(reply.record)
        return Shard(batch, reply)
