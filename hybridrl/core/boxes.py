"""Boxes: parts of a tensor that are a range in every dim.

What one rank holds of a tensor is a few boxes, however the tensor was cut. All functions are pure
and count in elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

Box = tuple[tuple[int, int], ...]
"""``[start, stop)`` of each dim; ``()`` is the one element of a scalar."""


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
