"""The moments of an optimizer in the host's memory: on the device only while they are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridrl.core.device import SideStream


class HostedMoments:
    """Steps an optimizer part by part. The moments of the next part come while one is stepped, so
    the device never holds those of more than two.

    Args:
        optimizer: Of `parts`; what it remembers may lie anywhere before the first step.
        parts: Parameters that are stepped together.
        device: Where they are.

    Attributes:
        brought: Tensors that have been moved to the device so far.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Sequence[Sequence[nn.Parameter]],
        device: torch.device,
    ) -> None:
        self._optimizer = optimizer
        self._parts = [set(part) for part in parts if part]
        self._device = device
        self._stream = SideStream(device)
        self.brought = 0

    def step(self) -> None:
        """One step of all parts; their moments are in the host's memory when it returns."""
        with self._stream:
            self._bring(0)
        for number, part in enumerate(self._parts):
            self._stream.join()
            with self._stream:
                self._bring(number + 1)
            with self._only(part):
                self._optimizer.step()
            self._stream.wait_for_current()
            with self._stream:
                self._put_away(part)
        self._stream.finish()

    def put_away(self) -> None:
        """Moves to the host's memory what is not there yet."""
        self._stream.wait_for_current()
        with self._stream:
            for part in self._parts:
                self._put_away(part)
        self._stream.finish()

    def _bring(self, number: int) -> None:
        for part in self._parts[number : number + 1]:
            for state, name, value in self._moments(part):
                state[name] = value.to(self._device, non_blocking=True)
                self.brought += 1

    def _put_away(self, part: set[nn.Parameter]) -> None:
        for state, name, value in self._moments(part):
            # The host's memory is pinned, because the copy does not block.
            state[name] = value.to("cpu", non_blocking=True)
            self._stream.reads(value.to_local() if isinstance(value, DTensor) else value)

    def _moments(self, part: set[nn.Parameter]) -> Iterator[tuple[dict[str, Tensor], str, Tensor]]:
        for parameter in part:
            state = self._optimizer.state.get(parameter, {})
            for name, value in list(state.items()):
                if isinstance(value, Tensor) and value.ndim:
                    yield state, name, value

    @contextmanager
    def _only(self, part: set[nn.Parameter]) -> Iterator[None]:
        """Inside, the optimizer knows no other parameters."""
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [
            {**group, "params": mine}
            for group in groups
            if (mine := [p for p in group["params"] if p in part])
        ]
        try:
            yield
        finally:
            self._optimizer.param_groups = groups
