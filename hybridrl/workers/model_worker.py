"""ModelWorker: the base of every worker that holds models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hybridrl.controller import Worker
from hybridrl.parallel import process_group

if TYPE_CHECKING:
    from hybridrl.engine.train_engine import TrainEngine
    from hybridrl.layout.rank_mesh import Coordinate


class ModelWorker(Worker):
    """While it runs a call, its group is torch.distributed's whole world (see `process_group`), and
    its model is on the device, which it leaves when another role wants the memory. It stands where
    its model's mesh says."""

    @property
    def model_engine(self) -> TrainEngine | None:
        """The engine of its model; None: the worker has no model that is cut over ranks."""
        return None

    def coordinates(self) -> Mapping[str, Coordinate]:
        engine = self.model_engine
        return super().coordinates() if engine is None else engine.mesh.coordinates

    def enter(self) -> None:
        process_group.enter(self.context.role)
        if (engine := self.model_engine) is not None:
            engine.onload()

    def leave(self) -> None:
        if (engine := self.model_engine) is None:
            return
        if "train" in self.record.phases:  # those records are shown
            self.record.choices += engine.take_said()
        if engine.fault is not None:
            self.record.faults.append(engine.fault)
            engine.fault = None

    @property
    def takes_memory(self) -> bool:
        return True

    def make_room(self) -> None:
        if (engine := self.model_engine) is not None:
            engine.offload()
