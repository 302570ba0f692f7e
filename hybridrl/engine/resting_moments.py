"""The moments of an optimizer between its steps: in the host's memory, in half precision, or both.
On the device and in float32 they are only while they are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridrl.system.device_traits import SideStream


class RestingMoments:
    """Steps an optimizer part by part. The moments of the next part come while one is stepped, so
    the device never holds those of more than two as they are used.

    Args:
        optimizer: Of `parts`; what it remembers may lie anywhere before the first step.
        parts: Parameters that are stepped together.
        device: Where they are.
        place: Where moments rest.
        dtype: In what precision.

    Attributes:
        brought: Tensors that have been made ready for use so far.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Sequence[Sequence[nn.Parameter]],
        device: torch.device,
        place: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._optimizer = optimizer
        self._parts = [set(part) for part in parts if part]
        self._device, self._place, self._dtype = device, place, dtype
        self._stream = SideStream(device)
        self.brought = 0

    def step(self) -> None:
        """One step of all parts; their moments rest when it returns."""
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
        """Brings to rest what does not yet."""
        self._stream.wait_for_current()
        with self._stream:
            for part in self._parts:
                self._put_away(part)
        self._stream.finish()

    def _bring(self, number: int) -> None:
        for part in self._parts[number : number + 1]:
            for state, name, value in self._moments(part):
                state[name] = value.to(self._device, torch.float32, non_blocking=True)
                self.brought += 1

    def _put_away(self, part: set[nn.Parameter]) -> None:
        for state, name, value in self._moments(part):
            # The host's memory is pinned, because the copy does not block.
            state[name] = value.to(self._place, self._dtype, non_blocking=True)
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
