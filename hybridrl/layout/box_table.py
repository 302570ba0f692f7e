"""Copies of many small boxes between local tensors and a flat buffer, without a call from Python
for each: a rank of a large job has tens of thousands of them in every weight sync."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybridrl.layout.boxes import Box, Place, box_shape


class BoxTable:
    """Boxes in local tensors, whose values lie one after the other in a buffer.

    Args:
        places: Of each box, in the order of the buffer.
        boxes: Their sizes are those of these boxes.

    Attributes:
        sizes: By local tensor, the elements that its boxes have.
    """

    def __init__(self, places: Sequence[Place], boxes: Sequence[Box]) -> None:
        self._places, self._shapes = places, [box_shape(box) for box in boxes]
        self._lengths = [math.prod(shape) for shape in self._shapes]
        self._numbers: defaultdict[str, list[int]] = defaultdict(list)
        self.sizes: defaultdict[str, int] = defaultdict(int)
        for number, (place, length) in enumerate(zip(places, self._lengths, strict=True)):
            if length:
                self._numbers[place.tensor].append(number)
                self.sizes[place.tensor] += length

    @torch.no_grad()
    def write(self, find: Callable[[str], Tensor], buffer: Tensor) -> None:
        """Copy the values of a buffer into the boxes of the tensors that `find` returns, cast to
        their dtypes."""
        for boxes, values in self._pairs(find, buffer):
            torch._foreach_copy_(boxes, values)

    @torch.no_grad()
    def read(self, find: Callable[[str], Tensor], buffer: Tensor) -> None:
        """Copy the boxes of the tensors that `find` returns into a buffer, cast to its dtype."""
        for boxes, values in self._pairs(find, buffer):
            torch._foreach_copy_(values, boxes)

    def _pairs(
        self, find: Callable[[str], Tensor], buffer: Tensor
    ) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return boxes and their values in the buffer: contiguous ones, which a GPU copies by a few
        kernels, and others."""
        parts = buffer[: sum(self._lengths)].split(self._lengths)
        flat: tuple[list[Tensor], list[Tensor]] = [], []
        others: tuple[list[Tensor], list[Tensor]] = [], []
        for name, numbers in self._numbers.items():
            tensor = find(name)
            if (found := self._rows_of(tensor, numbers)) is not None:
                flat[0].extend(found)
                flat[1].extend(parts[number] for number in numbers)
            else:
                for number in numbers:
                    shape = self._shapes[number]
                    others[0].append(slice_at(tensor, self._places[number].start, shape))
                    others[1].append(parts[number].view(shape))
        return [pair for pair in (flat, others) if pair[0]]

    def _rows_of(self, tensor: Tensor, numbers: list[int]) -> list[Tensor] | None:
        """Return boxes of whole rows of a tensor, flat, which one call finds; None where they are
        not whole, or overlap."""
        width = tensor.shape[1:]
        if not (tensor.ndim and tensor.is_contiguous()):
            return None
        if any(self._shapes[number][1:] != width for number in numbers):
            return None
        order = sorted(numbers, key=lambda number: self._places[number].start)
        sizes, at, row = list[int](), 0, math.prod(width)
        for number in order:
            first, rows = self._places[number].start[0], self._shapes[number][0]
            if first < at:
                return None
            sizes += [(first - at) * row, rows * row]  # what is before it, and the box
            at = first + rows
        parts = dict(zip(order, tensor[:at].view(-1).split(sizes)[1::2], strict=True))
        return [parts[number] for number in numbers]


def slice_at(tensor: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the part of `tensor` with this shape that begins at `start`."""
    return tensor[tuple(slice(at, at + n) for at, n in zip(start, shape, strict=True))]
