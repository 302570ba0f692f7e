"""Under which names, and in which form, transformers keeps a model's parameters in files.

Most stand in them as they are. Of experts, which a model has together in one parameter, files have
each matrix alone. Instead of a table, transformers' own conversion to files is run on tensors
without memory: what it makes are views of the parameters, which tell their boxes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from hybridrl.checkpoint.file_plan import MODEL
from hybridrl.core.boxes import Box, intersection, relative, volume, whole
from hybridrl.core.layout import Layout
from hybridrl.core.pieces import Part, Piece
from hybridrl.core.views import storage, view_box
from hybridrl.models.adapters import adapter_names, has_adapters

ADAPTER_STEM = "adapter_model"
"""What the name of an adapter's file begins with, as peft has it."""
aten = torch.ops.aten


class StoredPart(NamedTuple):
    """A tensor in files that is a box of a parameter.

    Attributes:
        name: Of the tensor.
        parameter: Of which it is a part.
        box: Which part. First dims of one index may be lacking in the tensor.
        shape: Of the tensor.
    """

    name: str
    parameter: str
    box: Box
    shape: tuple[int, ...]

    @property
    def lacking(self) -> int:
        """Dims of the parameter that the tensor has not."""
        return len(self.box) - len(self.shape)

    def inside(self, box: Box) -> Box:
        """Where in the tensor a smaller box of the parameter is."""
        return relative(box, self.box)[self.lacking :]


class StoredForm(NamedTuple):
    """How a model's weights stand in files.

    Attributes:
        stem: What the names of the files begin with.
        parts: The tensors in them; with adapters, theirs alone.
    """

    stem: str
    parts: tuple[StoredPart, ...]

    def by_parameter(self) -> dict[str, list[StoredPart]]:
        """The tensors that each parameter is in."""
        found: dict[str, list[StoredPart]] = {}
        for part in self.parts:
            found.setdefault(part.parameter, []).append(part)
        return found

    def layout(self, layout: Layout) -> Layout:
        """Which part of each tensor the ranks hold that hold these parts of the parameters. What a
        rank holds of the index i of a parameter that is divided is called `<parameter>/<i>`,
        counted from the first that it holds; see `index_of`."""
        return layout.parts(
            {
                part.name: Part(
                    part.parameter, part.shape, (part.box, part.shape), partial(_piece, part)
                )
                for part in self.parts
            }
        )


def _piece(part: StoredPart, piece: Piece) -> Piece | None:
    if (shared := intersection(piece.box, part.box)) is None:
        return None
    tensor, start = piece.at(shared)
    first, start = start[: part.lacking], start[part.lacking :]
    return Piece(part.inside(shared), "/".join([tensor, *map(str, first)]), start)


def index_of(parts: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A local tensor of `StoredForm.layout`, of what a rank holds of the parameters."""
    parameter, *indices = name.split("/")
    return parts[parameter][tuple(map(int, indices))]


def most_bytes(stem: str, file_bytes: int) -> int:
    """Of one file: peft opens a single one only, so an adapter's is never split."""
    return sys.maxsize if stem == ADAPTER_STEM else file_bytes


def stored_form(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> StoredForm | None:
    """The form in which transformers, or peft, keeps a model whose parameters have these names and
    shapes; None if tensors of files are not parts of the parameters."""
    if has_adapters(model):
        names = adapter_names(model, shapes)
        return StoredForm(
            ADAPTER_STEM,
            tuple(_whole_part(stored, name, shapes[name]) for name, stored in names.items()),
        )
    parts = _converted(model, shapes)
    return None if parts is None else StoredForm(MODEL, parts)


def as_named(stem: str, shapes: Mapping[str, tuple[int, ...]]) -> StoredForm:
    """Every parameter as it is."""
    return StoredForm(stem, tuple(_whole_part(name, name, of) for name, of in shapes.items()))


def parts_in_files(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], stored: Iterable[str]
) -> dict[str, tuple[StoredPart, ...]]:
    """Of each parameter that is in files, as it is or in parts, the tensors that it is in.

    Args:
        shapes: Of the parameters, by name.
        stored: Names of the tensors in the files.
    """
    there = set(stored)
    found = {
        name: (_whole_part(stored_name(name), name, shape),)
        for name, shape in shapes.items()
        if stored_name(name) in there
    }
    others = {name: shape for name, shape in shapes.items() if name not in found}
    by_stored_name = {stored_name(name): name for name in others}
    if by_stored_name and is_converted(model):
        divided: dict[str, list[StoredPart]] = {}
        converted = {stored: shapes[name] for stored, name in by_stored_name.items()}
        for part in _converted(model, converted) or ():
            divided.setdefault(by_stored_name[part.parameter], []).append(part)
        for name, parts in divided.items():
            if all(part.name in there for part in parts):
                found[name] = tuple(part._replace(parameter=name) for part in parts)
    return found


def stored_name(name: str) -> str:
    """What a parameter beside which there is an adapter is called in the model's own files."""
    return name.replace(".base_layer.", ".")


def is_converted(model: PreTrainedModel) -> bool:
    """Whether files have other tensors than the parameters: of some models each expert alone."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return any(isinstance(one, WeightConverter) for one in conversions)


def _whole_part(name: str, parameter: str, shape: tuple[int, ...]) -> StoredPart:
    return StoredPart(name, parameter, whole(shape), tuple(shape))


def _converted(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[StoredPart, ...] | None:
    """The tensors that transformers makes of parameters of these names and shapes; None if they do
    not only divide and rename them, or leave some out."""
    mine = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {storage(tensor): name for name, tensor in mine.items()}
    with _CopiesAreViews():
        stored = revert_weight_conversion(model, dict(mine))
    left_out = set(model._keys_to_ignore_on_save or ())
    parts, covered = [], Counter[str]()
    for name, tensor in stored.items():
        if name in left_out:
            continue
        owner = owners.get(storage(tensor))
        box = None if owner is None else view_box(tensor, mine[owner])
        if owner is None or box is None:
            return None
        parts.append(StoredPart(name, owner, box, tuple(tensor.shape)))
        covered[owner] += volume(box)
    if any(covered[name] != tensor.numel() for name, tensor in mine.items()):
        return None
    return tuple(parts)


class _CopiesAreViews(TorchDispatchMode):
    """Inside, a copy of a tensor is the tensor: its elements are the same ones."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is aten.clone.default:
            return args[0].view_as(args[0])
        return func(*args, **(kwargs or {}))
