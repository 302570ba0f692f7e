"""Weight sync from trainer to generator: every rank receives the parts of its generation weights
that it does not hold as training weights, and nothing else.

Sheng et al., "HybridFlow" (EuroSys'25, arXiv:2409.19256), section 5: the 3D-HybridEngine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.layout.tensor_layout import (
    TensorLayout,
    TensorSink,
    TensorSource,
    TransferTraffic,
    compute_peak_elements,
    compute_redundant_elements,
    copy_moves,
    make_tensor_sink,
)
from hybridrl.layout.transfer_planner import plan_transfer
from hybridrl.parallel.collectives import all_gather_distinct
from hybridrl.parallel.process_group import ParallelMesh
from hybridrl.rollout.rollout_engine import RolloutEngine
from hybridrl.rollout.weight_writer import WeightPieces, WeightWriter
from hybridrl.system.device_traits import default_bucket_bytes
from hybridrl.weights.collective_reshard import CollectiveReshard
from hybridrl.weights.encoded_reshard import EncodedReshard, SyncCost
from hybridrl.weights.parcel_transfer import compute_round_capacity
from hybridrl.weights.weight_message import FULL_SYNC


class WeightSource(Protocol):
    """A model in training, as a sync reads it: the layout of its parameters over the mesh, this
    rank's shards of them, and its weights in full, one at a time."""

    has_adapters: bool
    device: torch.device
    mesh: ParallelMesh

    def layout(self) -> TensorLayout: ...

    def local_parameters(self) -> dict[str, Tensor]: ...

    def weights_for(self, adapters: bool) -> Iterator[tuple[str, Tensor]]: ...


class WeightSync:
    """A sync of weights between two layouts, planned once.

    Args:
        source: Layout of the weights that are trained.
        target: Of those that generate. Ranks of both are those of `group`.
        dtype: Precision of the rollout engine's weights.
        device: This rank's.
        group: None: this rank is alone.
        train: What this rank has of the source; None: nothing.
        rollout: What it has of the target; None: nothing.

    Attributes:
        plan: This rank's part.
        coded: What executes it by differences, once it has been.
    """

    def __init__(
        self,
        source: TensorLayout,
        target: TensorLayout,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None,
        train: WeightSource | None = None,
        rollout: RolloutEngine | None = None,
    ) -> None:
        self._train, self._rollout, self._dtype = train, rollout, dtype
        self._device, self._group = device, group
        # The group may be of another world than the current one.
        self._rank = 0 if group is None else group.rank()
        self.plan = plan_transfer(source, target, self._rank)
        self._reshard: CollectiveReshard | None = None
        self._room = compute_round_capacity(default_bucket_bytes("cpu"), dtype)
        self.coded: EncodedReshard | None = None
        before, after = source.of(self._rank), target.of(self._rank)
        self._peak = compute_peak_elements(before, after).get(self._rank, 0) * dtype.itemsize
        kept = compute_redundant_elements(before, after) if rollout is not None else {}
        self._redundant = kept.get(self._rank, 0) * dtype.itemsize

    @classmethod
    def between(
        cls, train: WeightSource, rollout: RolloutEngine, dtype: torch.dtype
    ) -> WeightSync | None:
        """Plan the sync between two layouts on the same ranks. Collective. Returns None where
        weights have to be sent in full: an engine cannot say which pieces it holds, or adapters
        have to be merged."""
        if train.has_adapters:
            return None
        source, group = train.layout(), train.mesh.group()
        target = _gather_target(source, rollout.pieces(source.shapes), group)
        if target is None:
            return None
        return cls(source, target, dtype, train.device, group, train, rollout)

    @classmethod
    def across(
        cls,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        train: WeightSource | None = None,
        rollout: RolloutEngine | None = None,
    ) -> WeightSync | None:
        """Plan the sync from the ranks of `group` that train to those that generate; None as in
        `between`. Collective over the group, in which the training ranks come first."""
        source = None if train is None or train.has_adapters else train.layout()
        said = [source]
        dist.broadcast_object_list(said, group=group, group_src=0)
        if (source := said[0]) is None:
            return None
        pieces = {} if rollout is None else rollout.pieces(source.shapes)
        if (target := _gather_target(source, pieces, group)) is None:
            return None
        return cls(source, target, dtype, device, group, train, rollout)

    def run(self) -> SyncCost:
        """Bring the current weights into the rollout engine. Collective."""
        read, write, writer = self._ends()
        if self._group is None:
            copy_moves(self.plan.copies, read, write, self._dtype, self._room)
            traffic = TransferTraffic()  # nothing is sent
        else:
            if self._reshard is None:
                self._reshard = CollectiveReshard(self.plan, self._dtype, self._device, self._group)
            traffic = self._reshard(read, write)
        if writer is not None:
            writer.finish()
        sent = SyncCost(traffic.received, traffic.sent, buffer=traffic.buffer)
        return self.cost(FULL_SYNC, sent)

    def run_coded(self, method: str, version: int) -> SyncCost:
        """Bring the current weights to separate generating ranks by this method; both sides keep a
        record of what the generator holds. Collective.

        Args:
            version: Of the records; each call's is higher.
        """
        read, write, writer = self._ends()
        assert self._group is not None, "what generates is on other ranks"
        if self.coded is None:
            self.coded = EncodedReshard(self.plan, self._dtype, self._device, self._group)
        traffic = self.coded(read, write, method, version)
        if writer is not None:
            writer.finish()
        return self.cost(method, traffic)

    def cost(self, method: str, traffic: SyncCost) -> SyncCost:
        """Return the cost of a sync by this method, with the memory that both layouts take."""
        return replace(traffic, method=method, peak=self._peak, redundant=self._redundant)

    def _ends(self) -> tuple[TensorSource, TensorSink, WeightWriter | None]:
        here: dict[str, Tensor] = {}
        if self._train is not None:
            here = self._train.local_parameters()
        if self._rollout is None:
            return here.__getitem__, make_tensor_sink({}), None
        writer = self._rollout.writer()
        return here.__getitem__, writer.write_boxes, writer


def _gather_target(
    source: TensorLayout, pieces: WeightPieces | None, group: dist.ProcessGroup | None
) -> TensorLayout | None:
    """Gather what each rank's engine holds; None if one of them cannot say."""
    found = [pieces] if group is None else all_gather_distinct(pieces, group)
    if any(here is None for here in found):
        return None
    return TensorLayout(source.shapes, {rank: here for rank, here in enumerate(found) if here})
