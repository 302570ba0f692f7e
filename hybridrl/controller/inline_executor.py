"""InlineExecutor: one host in the driver's own process. No Ray: `pdb` and profilers just work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hybridrl.batch.batch import Batch
from hybridrl.controller.executor import Executor
from hybridrl.controller.group_call import Call, Request, Result
from hybridrl.controller.shards import ShardInfo
from hybridrl.controller.worker_host import Host
from hybridrl.system.cluster_spec import Cluster, Device, choose_devices


class InlineExecutor(Executor):
    """Runs every call at once, where it is made. Exceptions of workers reach the driver as they
    are."""

    def __init__(self, devices: str = "auto", run_directory: Path | None = None) -> None:
        super().__init__()
        kind, _ = choose_devices(devices, 1, torch.accelerator.device_count(), 1)
        self.cluster = Cluster([Device(kind, "localhost", 0)])
        self.run_directory = run_directory
        self._host = Host(raises=True, redirects=False)

    def _send(self, call: Call, request: Request, returns_batch: bool) -> Any:
        batch, reply = self._host.run(request, call.parts[0])
        call.replies[0] = reply
        self._finished(call)
        return batch

    def _store(self, batch: Batch, info: ShardInfo) -> Batch:
        return batch

    def fetch(self, result: Result, index: int) -> Batch:
        return result.data

    def wait(self, calls: Sequence[Call], limit: float | None = None) -> bool:
        return True  # every call is done when it returns

    def close(self) -> None:
        self.takes_calls = False
        self._host.close()
