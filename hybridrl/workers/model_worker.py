"""ModelWorker: the base of every worker that holds models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridrl.controller import Worker
from hybridrl.parallel import process_group

if TYPE_CHECKING:
    from hybridrl.engine.train import TrainEngine


class ModelWorker(Worker):
    """While it runs a call, its group is torch.distributed's whole world (see `process_group`), and
    its model is on the device."""

    @property
    def model_engine(self) -> TrainEngine | None:
        """What leaves the device between calls, if it is to."""
        return None

    def enter(self) -> None:
        process_group.enter(self.context.role)
        if (engine := self.model_engine) is not None:
            engine.unpark()

    def leave(self) -> None:
        if (engine := self.model_engine) is not None:
            engine.park()
