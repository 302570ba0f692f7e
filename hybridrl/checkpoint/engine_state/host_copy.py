"""A copy, in memory of the host, of what a rank is to write while training changes the original."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hybridrl.checkpoint.tensors.file_plan import FilePart
from hybridrl.checkpoint.tensors.tensor_reader import TensorInFiles
from hybridrl.checkpoint.tensors.tensor_writer import values_of
from hybridrl.layout.boxes import extent
from hybridrl.system.device_traits import host_memory, mark


class HostCopy:
    """Memory for the values of these parts, one after the other, that is filled time after time.

    Attributes:
        values: Of each part, of the shape of its box and in the precision of its file.
    """

    def __init__(self, parts: Sequence[FilePart], device: torch.device) -> None:
        self._parts, self._device = parts, device
        self.values: list[Tensor] = []
        memory = host_memory(sum(part.size for part in parts), device)
        at = 0
        for part in parts:
            flat = memory[at : at + part.size].view(part.entry.dtype)
            self.values.append(flat.view(extent(part.box)))
            at += part.size

    @torch.no_grad()
    def fill(self, sources: Mapping[str, Tensor | TensorInFiles | None]) -> Callable[[], None]:
        """Copies what local tensors hold now; zeros where there is none.

        From GPUs the copies are under way when this returns: the device does them before anything
        that it is given to do later, and the function that this gives waits for them. They go on
        the stream of training on purpose: what changes the originals next, the optimizer's step or
        a move to the host, is behind them in any case. On a stream of their own they would run
        beside the next forward only if each of these waited for them, one forgotten wait would
        write a state of two moments, and what is won is at most the time of the copies.
        """
        for part, into in zip(self._parts, self.values, strict=True):
            source = sources[part.source.tensor]
            if source is None:
                into.zero_()
            else:
                into.copy_(values_of(part, source), non_blocking=True)
        return mark(self._device)
