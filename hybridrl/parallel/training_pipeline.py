"""Pipeline parallelism: packed micro-batches pass through stages that lie on different ranks.

All ranks of a pipeline have the same rows, so each knows how many tokens every micro-batch has:
states travel as `[tokens, hidden]`, unpadded, with no word about their shape. The order of all that
happens is in `parallel.pipeline_schedule`; here it is done. torch.distributed.pipelining has the
same schedules, but its stages receive into buffers of one shape, and are private where that would
have to be changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridrl.models import PackedModel, PackedSamples
from hybridrl.parallel.pipeline_run import PipelineRun
from hybridrl.parallel.pipeline_schedule import Kind, schedule
from hybridrl.parallel.staged_model import StagedModel


class Pipeline:
    """This rank's place in a pipeline, and what its ranks do together.

    Every method but `cut` is collective over the pipeline.

    Args:
        group: The ranks of the pipeline in the order of the stages, at least 2.
        chunks: Stages on each rank; more than one interleaves them.
    """

    def __init__(self, group: dist.ProcessGroup, chunks: int = 1) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.chunks = chunks
        self.is_last = self.rank == self.ranks - 1

    def cut(self, model: PackedModel, dtype: torch.dtype) -> StagedModel:
        """Keeps this rank's stages of `model`, which is cut in place and will compute in `dtype`;
        see `StagedModel`."""
        return StagedModel(model, dtype, self.rank, self.ranks, self.chunks)

    @torch.no_grad()
    def score(
        self,
        model: StagedModel,
        micro_batches: Sequence[PackedSamples],
        take: Callable[[int, Mapping[str, Tensor]], None],
        **options: float,
    ) -> None:
        """Forwards only.

        Args:
            micro_batches: The same on all ranks.
            take: Called on the last rank with the number of a micro-batch and its outputs.
            options: Of the model's forward.
        """
        actions = schedule(self.ranks, self.chunks, len(micro_batches), training=False)
        run = PipelineRun(self.group, model, micro_batches, take, options)
        for action in actions[self.rank]:
            run.do(action)
        run.finish()

    def train(
        self,
        model: StagedModel,
        micro_batches: Sequence[PackedSamples],
        loss: Callable[[int, Mapping[str, Tensor]], Tensor],
        *,
        reduce_once: bool,
        **options: float,
    ) -> None:
        """Forwards and backwards; gradients are added to those of the parameters.

        Args:
            model: Sharded by FSDP2.
            micro_batches: The same on all ranks.
            loss: Called on the last rank with the number of a micro-batch and its outputs; gives
                the scalar whose gradient is wanted.
            reduce_once: Sharded gradients are reduced after the last micro-batch only.
            options: Of the model's forward.
        """
        actions = schedule(self.ranks, self.chunks, len(micro_batches), training=True)[self.rank]
        run = PipelineRun(self.group, model, micro_batches, loss, options)
        last = max(n for n, action in enumerate(actions) if action.kind is Kind.BACKWARD)
        for number, action in enumerate(actions):
            if action.kind is Kind.BACKWARD:
                model.set_requires_gradient_sync(number == last or not reduce_once)
                model.set_is_last_backward(number == last)
            run.do(action)
        run.finish()
        self._sum_tied(model)

    def from_last(self, value: Any) -> Any:
        """The last rank's `value`, a small object, on every rank."""
        box = [value]
        dist.broadcast_object_list(
            box, group=self.group, group_src=self.ranks - 1, device=torch.device("cpu")
        )
        return box[0]

    def _sum_tied(self, model: StagedModel) -> None:
        """A tied embedding is the first rank's input and the last one's output: its gradient is
        the sum of both, and the same on both, bit for bit."""
        if model.tied is None or not (self.rank == 0 or self.is_last):
            return
        gradient = model.inner.get_parameter(model.tied).grad
        if gradient is None:
            return
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if not local.numel():
            return
        other = torch.empty_like(local)
        # Both ranks put the two messages in one order: NCCL matches them by it.
        if self.rank == 0:
            work = dist.isend(local, group=self.group, group_dst=self.ranks - 1)
            dist.irecv(other, group=self.group, group_src=self.ranks - 1).wait()
        else:
            dist.irecv(other, group=self.group, group_src=0).wait()
            work = dist.isend(local, group=self.group, group_dst=0)
        work.wait()
        local.add_(other)
