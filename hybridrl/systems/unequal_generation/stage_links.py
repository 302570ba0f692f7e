"""The links between stages of a generation pipeline: hidden states go on, tokens come back.

Each way has process groups of its own. NCCL does what two ranks ask of one group in the order in
which they ask, and a stage that sends states while tokens are on their way to it would wait for
ever.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.systems.unequal_generation.generation_plan import GenerationPlan

PendingTensor = tuple[dist.Work | None, Tensor]
"""What is under way; None in place of the work: it is done."""


class StageLinks:
    """The process groups that link this rank's stage with the others. Building it is collective
    over the world, whose ranks share a model block by block.

    Attributes:
        stage: The number of this rank's stage.
        is_last: Whether it is the last one.
    """

    def __init__(self, plan: GenerationPlan, dtype: torch.dtype, device: torch.device) -> None:
        self._ranks = [stage.device for stage in plan.stages]
        self._dtype, self._device = dtype, device
        self._sending: dict[Hashable, list[PendingTensor]] = {}
        count = len(self._ranks)
        own = 0
        if count > 1:
            world = dist.get_world_size()
            blocks = [list(range(first, first + count)) for first in range(0, world, count)]
            self._states, _ = dist.new_subgroups_by_enumeration(blocks)
            self._tokens, _ = dist.new_subgroups_by_enumeration(blocks)
            own = dist.get_rank() % count
        self.stage = self._ranks.index(own)
        self.is_last = self.stage == count - 1

    def send_states(self, key: Hashable, states: Tensor) -> None:
        """Send hidden states to the next stage without waiting.

        Args:
            key: See `settle`.
        """
        after = self._ranks[self.stage + 1]
        states = states.contiguous()
        work = dist.isend(states, group=self._states, group_dst=after)
        self._sending.setdefault(key, []).append((work, states))

    def expect_states(self, *shape: int) -> PendingTensor:
        """Start to receive the next hidden states of the previous stage."""
        states = torch.empty(shape, dtype=self._dtype, device=self._device)
        before = self._ranks[self.stage - 1]
        return dist.irecv(states, group=self._states, group_src=before), states

    def tell_tokens(self, key: Hashable, tokens: Tensor) -> None:
        """Send tokens from the last stage to all others without waiting."""
        for rank in self._ranks[:-1]:
            work = dist.isend(tokens, group=self._tokens, group_dst=rank)
            self._sending.setdefault(key, []).append((work, tokens))

    def expect_tokens(self, rows: int) -> PendingTensor:
        """Start to receive the next tokens of the last stage."""
        tokens = torch.empty(rows, dtype=torch.int64, device=self._device)
        return dist.irecv(tokens, group=self._tokens, group_src=self._ranks[-1]), tokens

    def settle(self, key: Hashable) -> None:
        """Wait until all messages with this key have been sent."""
        for message in self._sending.pop(key, ()):
            receive_tensor(message)

    def settle_all(self) -> None:
        """Wait until all messages have been sent."""
        for key in list(self._sending):
            self.settle(key)

    def from_last(self, values: Tensor) -> Tensor:
        """Broadcast values of the last stage and return them on all."""
        if len(self._ranks) > 1:
            dist.broadcast(values, group=self._tokens, group_src=self._ranks[-1])
        return values


def receive_tensor(message: PendingTensor) -> Tensor:
    """Wait for a tensor that is under way and return it."""
    work, values = message
    if work is not None:
        work.wait()
    return values
