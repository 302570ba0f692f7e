"""The storage of an optimizer's moments between steps: on the host (`actor.offload_optimizer`), in
fewer bits, or both. Between the calls of a step, `TrainEngine.offload` moves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridrl.compress.dynamic_codes import BlockCodes, encode_blocks
from hybridrl.parallel.process_group import to_local
from hybridrl.system.device_traits import SideStream, copy_to_device
from hybridrl.system.dtypes import DTYPES

INT8_MOMENTS = "int8"
"""Value of `actor.optimizer.moments` that keeps `BlockCodes` of matrices."""
_NEVER_NEGATIVE = "exp_avg_sq"


def read_moment(value: Any) -> Tensor:
    """Return this rank's part of a moment, however it is stored."""
    return value.decode() if isinstance(value, BlockCodes) else to_local(value)


class MomentStorage:
    """A wrapper that steps an optimizer part by part. The moments of the next part are loaded while
    one is stepped, so that the device never holds the working copies of more than two parts.

    Args:
        optimizer: Of `parts`; what it remembers may lie anywhere before the first step.
        parts: Parameters that are stepped together.
        device: Where they are.
        place: Where moments rest.
        precision: In what precision: a name of `DTYPES`, or `INT8_MOMENTS`, in which vectors and
            what is not of a parameter's shape stay float32.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Sequence[Sequence[nn.Parameter]],
        device: torch.device,
        place: torch.device,
        precision: str,
    ) -> None:
        self._optimizer = optimizer
        self._parts = [set(part) for part in parts if part]
        self._device, self._place = device, place
        self._encodes = precision == INT8_MOMENTS
        self._dtype = torch.float32 if self._encodes else DTYPES[precision]
        self._stream = SideStream(device)

    def step(self) -> None:
        """Step all parts; their moments are stored again when it returns."""
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
        """Store the moments that are not stored yet."""
        self._stream.wait_for_current()
        with self._stream:
            for part in self._parts:
                self._put_away(part)
        self._stream.finish()

    def _bring(self, number: int) -> None:
        for part in self._parts[number : number + 1]:
            for parameter, state, name, value in self._moments(part):
                if isinstance(value, BlockCodes):
                    found = torch.empty_like(parameter)
                    # On the stream that decodes them, which need not wait.
                    codes, scales = (self._fetch(part) for part in value[:2])
                    to_local(found).copy_(BlockCodes(codes, scales, value.signed).decode())
                    state[name] = found
                else:
                    state[name] = value.to(self._device, torch.float32, non_blocking=True)

    def _fetch(self, part: Tensor) -> Tensor:
        return part if part.device == self._device else copy_to_device(part, self._device)

    def _put_away(self, part: set[nn.Parameter]) -> None:
        for parameter, state, name, value in self._moments(part):
            if isinstance(value, BlockCodes):
                continue
            if self._encodes and parameter.ndim > 1 and value.shape == parameter.shape:
                codes = encode_blocks(to_local(value), signed=name != _NEVER_NEGATIVE)
                state[name] = codes.to(self._place)
            else:
                # The host's memory is pinned, because the copy does not block.
                state[name] = value.to(self._place, self._dtype, non_blocking=True)
            self._stream.reads(to_local(value))

    def _moments(
        self, part: set[nn.Parameter]
    ) -> Iterator[tuple[nn.Parameter, dict[str, Any], str, Any]]:
        for parameter in part:
            state = self._optimizer.state.get(parameter, {})
            for name, value in list(state.items()):
                if isinstance(value, BlockCodes) or (isinstance(value, Tensor) and value.ndim):
                    yield parameter, state, name, value

    @contextmanager
    def _only(self, part: set[nn.Parameter]) -> Iterator[None]:
        """Restrict the optimizer to these parameters inside the block."""
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
