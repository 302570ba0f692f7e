"""One pass of micro-batches through this rank's stages, action by action."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.models import PackedSamples
from hybridrl.parallel.pipeline_schedule import Action, Kind
from hybridrl.parallel.staged_model import StagedModel


class _Kept(NamedTuple):
    """What the backward of a forward needs: the states it began with, and its result."""

    states: Tensor | None
    result: Tensor


class PipelineRun:
    """Does the actions of a schedule, and keeps what lies between them.

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
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._received: dict[Action, tuple[dist.Work, Tensor]] = {}
        self._to_send: dict[Action, Tensor] = {}
        self._sending: dict[tuple[Kind, int], tuple[dist.Work, Tensor]] = {}

    def do(self, action: Action) -> None:
        """Does one action. Messages are only started; what takes one waits for it."""
        kind, stage, micro_batch = action
        match kind:
            case Kind.FORWARD:
                self._forward(stage, micro_batch)
            case Kind.BACKWARD:
                self._backward(stage, micro_batch)
            case Kind.SEND_STATES:
                self._send(action, stage + 1)
            case Kind.RECEIVE_STATES:
                self._receive(action, stage - 1)
            case Kind.SEND_GRADIENT:
                self._send(action, stage - 1)
            case Kind.RECEIVE_GRADIENT:
                self._receive(action, stage + 1)

    def finish(self) -> None:
        """Waits for the last messages."""
        for work, _ in self._sending.values():
            work.wait()
        self._sending.clear()

    def _forward(self, stage: int, number: int) -> None:
        samples, training = self._micro_batches[number], torch.is_grad_enabled()
        states = None
        if stage:
            states = self._take(Action(Kind.RECEIVE_STATES, stage, number)).requires_grad_(training)
        result = self._model(samples, stage=stage, states=states, **self._options)
        if isinstance(result, Mapping):
            result = self._answer(number, result)
        else:
            self._to_send[Action(Kind.SEND_STATES, stage, number)] = result.detach()
        if training:
            self._kept[stage, number] = _Kept(states, result)

    def _backward(self, stage: int, number: int) -> None:
        states, result = self._kept.pop((stage, number))
        gradient = None  # a loss is its own beginning
        if result.ndim:
            gradient = self._take(Action(Kind.RECEIVE_GRADIENT, stage, number))
        if result.requires_grad:  # a first stage may be frozen
            torch.autograd.backward(result, gradient)
        if states is not None:
            self._to_send[Action(Kind.SEND_GRADIENT, stage, number)] = states.grad

    def _send(self, action: Action, to_stage: int) -> None:
        peer = to_stage % self._ranks
        # One message of a kind on its way to a peer, so that sent tensors do not pile up.
        if earlier := self._sending.pop((action.kind, peer), None):
            earlier[0].wait()
        tensor = self._to_send.pop(action).contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=peer)
        self._sending[action.kind, peer] = (work, tensor)

    def _receive(self, action: Action, from_stage: int) -> None:
        tokens = self._micro_batches[action.micro_batch].input_ids
        shape = (tokens.numel(), self._model.hidden_size)
        buffer = torch.empty(shape, dtype=self._model.dtype, device=tokens.device)
        work = dist.irecv(buffer, group=self._group, group_src=from_stage % self._ranks)
        self._received[action] = (work, buffer)

    def _take(self, action: Action) -> Tensor:
        work, buffer = self._received.pop(action)
        work.wait()
        return buffer
