"""Boxes: parts of a tensor that are a range in every dim.

What one rank holds of a tensor is a few boxes, however the tensor was cut. All functions are pure
and count in elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from hybridrl.errors import ConfigError

Box = tuple[tuple[int, int], ...]
"""``[start, stop)`` of each dim; ``()`` is the one element of a scalar."""

Cut = Callable[[int, int, int], tuple[int, int]]
"""(length, index, count) to the range that part `index` of `count` holds."""


def whole(shape: Iterable[int]) -> Box:
    """The box that holds all of a tensor."""
    return tuple((0, length) for length in shape)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Number of elements."""
    return math.prod([stop - start for start, stop in box])


def intersection(first: Box, second: Box) -> Box | None:
    """The elements that two boxes of one tensor share; None if there are none."""
    shared = []
    for (start, stop), (other_start, other_stop) in zip(first, second, strict=True):
        low = start if start > other_start else other_start
        high = stop if stop < other_stop else other_stop
        if low >= high:
            return None
        shared.append((low, high))
    return tuple(shared)


def relative(box: Box, outer: Box) -> Box:
    """A box counted from the first corner of one that it lies in."""
    pairs = zip(box, outer, strict=True)
    return tuple((start - origin, stop - origin) for (start, stop), (origin, _) in pairs)


def subtract(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes, two per dim at most, of what is in `box` and not in `hole`."""
    shared = intersection(box, hole)
    if shared is None:
        return [box] if volume(box) else []
    left = []
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, shared, strict=True)):
        # Before this dim the boxes have the hole's ranges, after it those of the whole.
        left += [
            (*shared[:dim], side, *box[dim + 1 :])
            for side in ((start, low), (high, stop))
            if side[0] < side[1]
        ]
    return left


def subtract_all(box: Box, holes: Iterable[Box]) -> list[Box]:
    """Disjoint boxes of what is in `box` and in none of `holes`."""
    left = [box] if volume(box) else []
    for hole in holes:
        left = [part for piece in left for part in subtract(piece, hole)]
    return left


def disjoint(boxes: Iterable[Box]) -> list[Box]:
    """Disjoint boxes that together hold what any of `boxes` holds."""
    found: list[Box] = []
    for box in boxes:
        found += subtract_all(box, found)
    return found


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements ``[start, stop)`` of the flattened tensor: at most ``2 * ndim - 1`` boxes.

    The boxes come in the order of the elements and each is one run of them, so a flat shard is
    these boxes one after the other.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ConfigError(
            f"Elements {start} to {stop} are not a range of a tensor of shape {tuple(shape)}."
        )
    return _boxes_of_range(tuple(shape), start, stop)


def _boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if start == stop:
        return []
    if not shape:
        return [()]
    inner = shape[1:]
    row = math.prod(inner)
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(first, _boxes_of_range(inner, head, tail))
    boxes = []
    if head:
        boxes += _in_row(first, _boxes_of_range(inner, head, row))
        first += 1
    if first < last:
        boxes.append(((first, last), *whole(inner)))
    return boxes + _in_row(last, _boxes_of_range(inner, 0, tail))


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [((row, row + 1), *box) for box in boxes]


def runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """Where a box lies in the flattened tensor: (first element, number of elements) of each run, in
    order and as few as there are."""
    if not volume(box):
        return
    last = len(shape)  # the dims from here on are whole, so a run goes through them
    while last and box[last - 1] == (0, shape[last - 1]):
        last -= 1
    if not last:
        yield 0, volume(box)
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(last)]
    start, stop = box[last - 1]
    found = [start * strides[-1]]  # a list at a time: of a tensor that is cut in columns a million
    for side, stride in zip(box[: last - 1], strides, strict=False):
        found = [at + place * stride for at in found for place in range(*side)]
    count = (stop - start) * strides[-1]
    for at in found:
        yield at, count


def windows(box: Box, most: int) -> Iterator[Box]:
    """The box in parts of at most `most` elements, at least 1, in the order of its elements: each
    is cut along the first dims, so that it has the longest runs."""
    size = volume(box)
    if size <= most:
        if size:
            yield box
        return
    dim = next(dim for dim, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    rows = max(most // (size // (stop - start)), 1)
    for low in range(start, stop, rows):
        yield from windows((*box[:dim], (low, min(low + rows, stop)), *box[dim + 1 :]), most)


def chunk_range(length: int, index: int, count: int) -> tuple[int, int]:
    """The rule of `torch.chunk`, and so of DTensor and FSDP2: every part has ``ceil(length /
    count)`` elements until none are left; the last parts may be smaller or empty."""
    size = -(-length // count)
    return min(index * size, length), min((index + 1) * size, length)
