"""Boxes of a tensor, and where they lie in the tensors of one rank."""

from __future__ import annotations

from typing import NamedTuple

from hybridrl.core.boxes import Box


class Piece(NamedTuple):
    """A box of a global tensor that a rank holds.

    Attributes:
        box: Of the global tensor.
        tensor: Name of the rank's own tensor that holds it.
        start: Where the box begins in that tensor; there it has the same shape.
    """

    box: Box
    tensor: str
    start: tuple[int, ...]
