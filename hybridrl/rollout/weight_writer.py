"""A writer that puts weights into an engine box by box, and a comparison of what arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.layout.box_table import BoxTable
from hybridrl.layout.boxes import Box, Piece, Place, box_numel, box_shape

WeightPieces = Mapping[str, tuple[Piece, ...]]
"""Checkpoint name to the boxes of that tensor that this rank's engine holds."""


class EngineTensor(NamedTuple):
    """A tensor of the engine in one of the forms in which the engine keeps it.

    Attributes:
        called: In words: its name, or that it is a packed copy.
        values: In the order in which it is loaded.
        rounded: What the engine makes of values that come; None: they are rounded to its precision.
    """

    called: str
    values: Tensor
    rounded: Callable[[Tensor], Tensor] | None = None


class WeightWriter:
    """A writer that takes each element of `pieces` once, in boxes of any size, then `finish`.

    Boxes that are neighbours in a tensor, and tensors that are neighbours in the model, should
    come together: an engine that repacks weights holds those of an unfinished layer twice.

    Args:
        parameters: The engine's tensors, written in place.
        pieces: What is to be written.
    """

    def __init__(self, parameters: Mapping[str, Tensor], pieces: WeightPieces) -> None:
        self._parameters = parameters
        self.missing = {
            name: sum(box_numel(piece.box) for piece in held)
            for name, held in group_by_tensor(pieces).items()
        }

    def write(self, tensor: str, start: tuple[int, ...], values: Tensor) -> None:
        """Copy `values`, of any dtype and device, to `start` of the engine's tensor `tensor`."""
        box = tuple((0, size) for size in values.shape)
        self.write_boxes(BoxTable([Place(tensor, start)], [box]), values.reshape(-1))

    @torch.no_grad()
    def write_boxes(self, table: BoxTable, values: Tensor) -> None:
        """Copy values, of any dtype and device, to boxes in the engine's tensors, all at once."""
        targets = {tensor: self._target(tensor) for tensor in table.sizes}
        table.write(targets.__getitem__, values)
        for tensor, size in table.sizes.items():
            self.missing[tensor] -= size
            if self.missing[tensor] < 0:
                raise RuntimeError(f"Elements of {tensor} were written twice.")
            if self.missing[tensor] == 0:
                self._complete(tensor)

    @torch.no_grad()
    def finish(self) -> None:
        """Check that every element was written; call it after the last `write`.

        Raises:
            RuntimeError: elements are missing.
        """
        missing = {name: count for name, count in self.missing.items() if count}
        if missing:
            raise RuntimeError(f"Weights did not all arrive; elements missing: {missing}.")

    def _target(self, tensor: str) -> Tensor:
        return self._parameters[tensor]

    def _complete(self, tensor: str) -> None:
        """Handle a tensor that has all its elements; a hook for subclasses."""


def find_weight_mismatches(
    weights: Iterable[tuple[str, Tensor]],
    pieces: WeightPieces,
    forms: Callable[[str], Iterator[EngineTensor]],
) -> list[str]:
    """Return a sentence for every box in which an engine's weights are not `weights`, bit for bit
    after rounding to the engine's precision, and for every tensor that is not zero where no box is.

    Args:
        weights: Every tensor whole, under its checkpoint name.
        pieces: What the engine holds of them.
        forms: Given the name of one of the engine's tensors, the forms in which the engine keeps
            it.
    """
    found = []
    for name, whole in weights:
        for piece in pieces.get(name, ()):
            expected = whole[box_slices(piece.box)]
            kept = list(forms(piece.tensor))
            if not kept:
                found.append(f"{piece.tensor} cannot be read back.")
            for form, values, rounded in kept:
                values = values[box_slices(target_box(piece))]
                wanted = expected.to(values.device, values.dtype)
                wrong = values != (wanted if rounded is None else rounded(wanted))
                if wrong.any():
                    found.append(
                        f"{name} {list(piece.box)}: {int(wrong.sum())} of {wrong.numel()} elements "
                        f"differ in {form}."
                    )
    for tensor, held in group_by_tensor(pieces).items():
        for form, values, _ in forms(tensor):
            if sum(box_numel(piece.box) for piece in held) < values.numel():
                rest = values.clone()
                for piece in held:
                    rest[box_slices(target_box(piece))] = 0
                if rest.any():
                    found.append(f"The padding of {form} is not zero.")
    return found


def group_by_tensor(pieces: WeightPieces) -> dict[str, list[Piece]]:
    """Group pieces by the engine's tensor that they lie in."""
    found: dict[str, list[Piece]] = {}
    for held in pieces.values():
        for piece in held:
            found.setdefault(piece.tensor, []).append(piece)
    return found


def box_slices(box: Box) -> tuple[slice, ...]:
    """Return the index that selects a box."""
    return tuple(slice(start, stop) for start, stop in box)


def target_box(piece: Piece) -> Box:
    """Return the box that a piece fills in the engine's tensor."""
    return tuple((at, at + n) for at, n in zip(piece.start, box_shape(piece.box), strict=True))
