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

from hybridrl.models.packed_samples import PackedSamples
from hybridrl.parallel.pipeline_schedule import ActionKind, PipelineAction, build_schedule
from hybridrl.parallel.process_group import to_local
from hybridrl.parallel.staged_model import StagedModel


class TrainingPipeline:
    """A training pipeline as one of its ranks sees it.

    Every method is collective over the pipeline.

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

    @torch.no_grad()
    def score(
        self,
        model: StagedModel,
        micro_batches: Sequence[PackedSamples],
        take: Callable[[int, Mapping[str, Tensor]], None],
        **options: float,
    ) -> None:
        """Run the forwards of all micro-batches.

        Args:
            micro_batches: The same on all ranks.
            take: Called on the last rank with the number of a micro-batch and its outputs.
            options: Of the model's forward.
        """
        actions = build_schedule(self.ranks, self.chunks, len(micro_batches), training=False)
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
        """Run forwards and backwards of all micro-batches and accumulate gradients.

        Args:
            model: Sharded by FSDP2.
            micro_batches: The same on all ranks.
            loss: Called on the last rank with the number of a micro-batch and its outputs; gives
                the scalar whose gradient is wanted.
            reduce_once: Sharded gradients are reduced after the last micro-batch only.
            options: Of the model's forward.
        """
        schedule = build_schedule(self.ranks, self.chunks, len(micro_batches), training=True)
        actions = schedule[self.rank]
        run = PipelineRun(self.group, model, micro_batches, loss, options)
        last = max(n for n, action in enumerate(actions) if action.kind is ActionKind.BACKWARD)
        for number, action in enumerate(actions):
            if action.kind is ActionKind.BACKWARD:
                model.set_requires_gradient_sync(number == last or not reduce_once)
                model.set_is_last_backward(number == last)
            run.do(action)
        run.finish()
        self._sum_tied(model)

    def from_last(self, value: Any) -> Any:
        """Broadcast a small object from the last rank to every rank and return it."""
        box = [value]
        dist.broadcast_object_list(
            box, group=self.group, group_src=self.ranks - 1, device=torch.device("cpu")
        )
        return box[0]

    def _sum_tied(self, model: StagedModel) -> None:
        """Sum the gradients of a tied embedding, which is the first rank's input and the last one's
        output, so that both have the same bits."""
        if model.tied is None or not (self.rank == 0 or self.is_last):
            return
        gradient = model.inner.get_parameter(model.tied).grad
        if gradient is None:
            return
        local = to_local(gradient)
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


class PipelineRun:
    """A pass that runs the actions of a schedule and keeps the tensors between them.

    Args:
        group: The ranks of the pipeline.
        micro_batches: The same on all ranks.
        answer: Called on the last rank with the number of a micro-batch and its outputs. With
            gradients enabled it gives the scalar whose gradient is wanted.
        options: Of the model's forward.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        model: StagedModel,
        micro_batches: Sequence[PackedSamples],
        answer: Callable[[int, Mapping[str, Tensor]], Tensor | None],
        options: Mapping[str, float],
    ) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._model = model
        self._micro_batches = micro_batches
        self._answer = answer
        self._options = options
        # The input states and the result of a forward, for its backward.
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._received: dict[PipelineAction, tuple[dist.Work, Tensor]] = {}
        self._to_send: dict[PipelineAction, Tensor] = {}
        self._sending: dict[tuple[ActionKind, int], tuple[dist.Work, Tensor]] = {}

    def do(self, action: PipelineAction) -> None:
        """Run one action. Sends and receives are only started; the action that needs a message
        waits for it."""
        kind, stage, micro_batch = action
        match kind:
            case ActionKind.FORWARD:
                self._forward(stage, micro_batch)
            case ActionKind.BACKWARD:
                self._backward(stage, micro_batch)
            case ActionKind.SEND_STATES:
                self._send(action, stage + 1)
            case ActionKind.RECEIVE_STATES:
                self._receive(action, stage - 1)
            case ActionKind.SEND_GRADIENT:
                self._send(action, stage - 1)
            case ActionKind.RECEIVE_GRADIENT:
                self._receive(action, stage + 1)

    def finish(self) -> None:
        """Wait for the sends that are still under way."""
        for work, _ in self._sending.values():
            work.wait()
        self._sending.clear()

    def _forward(self, stage: int, number: int) -> None:
        samples, training = self._micro_batches[number], torch.is_grad_enabled()
        states = None
        if stage:
            states = self._take(
                PipelineAction(ActionKind.RECEIVE_STATES, stage, number)
            ).requires_grad_(training)
        result = self._model(samples, stage=stage, states=states, **self._options)
        if isinstance(result, Mapping):
            result = self._answer(number, result)
        else:
            self._to_send[PipelineAction(ActionKind.SEND_STATES, stage, number)] = result.detach()
        if training:
            self._kept[stage, number] = states, result

    def _backward(self, stage: int, number: int) -> None:
        states, result = self._kept.pop((stage, number))
        gradient = None  # a loss is its own beginning
        if result.ndim:
            gradient = self._take(PipelineAction(ActionKind.RECEIVE_GRADIENT, stage, number))
        if result.requires_grad:  # a first stage may be frozen
            torch.autograd.backward(result, gradient)
        if states is not None:
            self._to_send[PipelineAction(ActionKind.SEND_GRADIENT, stage, number)] = states.grad

    def _send(self, action: PipelineAction, to_stage: int) -> None:
        peer = to_stage % self._ranks
        # One message of a kind on its way to a peer, so that sent tensors do not pile up.
        if earlier := self._sending.pop((action.kind, peer), None):
            earlier[0].wait()
        tensor = self._to_send.pop(action).contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=peer)
        self._sending[action.kind, peer] = (work, tensor)

    def _receive(self, action: PipelineAction, from_stage: int) -> None:
        tokens = self._micro_batches[action.micro_batch].input_ids
        shape = (tokens.numel(), self._model.hidden_size)
        buffer = torch.empty(shape, dtype=self._model.dtype, device=tokens.device)
        work = dist.irecv(buffer, group=self._group, group_src=from_stage % self._ranks)
        self._received[action] = (work, buffer)

    def _take(self, action: PipelineAction) -> Tensor:
        work, buffer = self._received.pop(action)
        work.wait()
        return buffer
