"""ModelWorker: the base of every worker that holds models."""

from __future__ import annotations

from hybridrl.controller import Worker
from hybridrl.parallel import process_group


class ModelWorker(Worker):
    """While it runs a call, its group is torch.distributed's whole world; see `process_group`."""

    def enter(self) -> None:
        process_group.enter(self.context.role)
