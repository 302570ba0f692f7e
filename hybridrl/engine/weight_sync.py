"""From training to generation: every rank gets what its part of the generation weights lacks of its
part of the training weights, and nothing else.

Sheng et al., "HybridFlow" (EuroSys'25, arXiv:2409.19256), section 5: the 3D-HybridEngine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridrl.core.footprint import peak, redundant
from hybridrl.core.layout import Layout, plan
from hybridrl.engine.train import TrainEngine
from hybridrl.reshard.collectives import Reshard
from hybridrl.reshard.in_process import reshard_in_process
from hybridrl.reshard.parcels import Traffic
from hybridrl.rollout.base import RolloutEngine


@dataclass(frozen=True)
class SyncCost:
    """What a sync costs this rank, in bytes of the generation's precision.

    Attributes:
        received, sent: From and to other ranks.
        peak: Parameters at the fullest moment, those of both layouts, what they share once.
        redundant: Of the training parameters those that generation on this rank has no use for.
        buffer: Most memory for messages.
    """

    received: int
    sent: int
    peak: int
    redundant: int
    buffer: int


class WeightSync:
    """The way from the one layout to the other, worked out once.

    Args:
        train: Source of the weights.
        rollout: Its `pieces` are the target.
        target: Of all ranks.
        dtype: Precision of the rollout engine's weights.
    """

    def __init__(
        self, train: TrainEngine, rollout: RolloutEngine, target: Layout, dtype: torch.dtype
    ) -> None:
        self._train, self._rollout, self._dtype = train, rollout, dtype
        source = train.layout()
        self._plan = plan(source, target)
        self._rank = train.mesh.place
        group = train.mesh.group()
        self._reshard = None if group is None else Reshard(self._plan, dtype, train.device, group)
        self._peak = peak(source, target)[self._rank] * dtype.itemsize
        self._redundant = redundant(source, target)[self._rank] * dtype.itemsize

    @classmethod
    def between(
        cls, train: TrainEngine, rollout: RolloutEngine, dtype: torch.dtype
    ) -> WeightSync | None:
        """The way, or None where the weights have to go whole: an engine somewhere cannot
        say what it holds, or adapters are to be multiplied in. Collective."""
        pieces = None if train.has_adapters else rollout.pieces(train.layout().shapes)
        found = [pieces]
        if (group := train.mesh.group()) is not None:
            found = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, pieces, group=group)
        if any(of_rank is None for of_rank in found):
            return None
        target = Layout(train.layout().shapes, dict(enumerate(found)))
        return cls(train, rollout, target, dtype)

    def run(self) -> SyncCost:
        """Brings the weights of now into the rollout engine. Collective."""
        writer = self._rollout.writer()
        read = self._train.local_parameters().__getitem__
        if self._reshard is None:
            at, tensors, places = self._rank, read, writer.write
            traffic = reshard_in_process(self._plan, {at: tensors}, {at: places}, self._dtype)
            traffic = traffic.get(at, Traffic())
        else:
            traffic = self._reshard(read, writer.write)
        writer.finish()
        return SyncCost(traffic.received, traffic.sent, self._peak, self._redundant, traffic.buffer)
