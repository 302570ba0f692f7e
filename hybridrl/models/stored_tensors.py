"""The names and the form in which transformers keeps a model's parameters in files.

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
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from hybridrl.checkpoint.tensors.file_plan import MODEL_STEM
from hybridrl.checkpoint.tensors.tensor_reader import TensorInFiles, TensorReader
from hybridrl.layout.boxes import (
    Box,
    Part,
    Piece,
    PieceTable,
    box_numel,
    full_box,
    intersect_boxes,
    rebase_box,
)
from hybridrl.layout.tensor_layout import TensorLayout
from hybridrl.layout.tensor_views import find_view_box, storage_id
from hybridrl.models.lora import find_peft_names, has_adapters

_ADAPTER_STEM = "adapter_model"
"""What the name of an adapter's file begins with, as peft has it."""
CARRIED = "carried/"
"""Begins the local names of tensors that are copied from file to file."""
OUTPUT = "lm_head"
"""What heads over the vocabulary are called."""
_aten = torch.ops.aten


class StoredTensor(NamedTuple):
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
        """The number of the parameter's dims that the tensor does not have."""
        return len(self.box) - len(self.shape)

    def inside(self, box: Box) -> Box:
        """Return where in the tensor a smaller box of the parameter is."""
        return rebase_box(box, self.box)[self.lacking :]


class StorageFormat(NamedTuple):
    """A description of how a model's weights are kept in files.

    Attributes:
        stem: What the names of the files begin with.
        parts: The tensors in them; with adapters, theirs alone.
        source: The files that the model was read from; None: it was not, or in another form.
        carried: Names of those of its tensors that are no part of the model, such as towers and
            heads that are not built. They stand beside the parts as they are in `source`.
    """

    stem: str
    parts: tuple[StoredTensor, ...]
    source: TensorReader | None = None
    carried: tuple[str, ...] = ()

    def by_parameter(self) -> dict[str, list[StoredTensor]]:
        """Group the tensors by the parameter that they are parts of."""
        found: dict[str, list[StoredTensor]] = {}
        for part in self.parts:
            found.setdefault(part.parameter, []).append(part)
        return found

    def layout(self, layout: TensorLayout) -> TensorLayout:
        """Return the layout of the files' tensors on ranks that hold these parts of the parameters.
        What a rank holds of the index i of a parameter that is divided is called `<parameter>/<i>`,
        counted from the first that it holds; see `select_local_tensor`."""
        return layout.parts(
            {
                part.name: Part(
                    part.parameter, part.shape, (part.box, part.shape), partial(_piece, part)
                )
                for part in self.parts
            }
        )

    def all_tensors(self, layout: TensorLayout) -> TensorLayout:
        """Return `layout(layout)` and the carried tensors, of which each rank can read all."""
        own = self.layout(layout)
        if not self.carried:
            return own
        shapes = {name: self.source.shapes[name] for name in self.carried}
        here = own.table.ranks
        kinds = {shape: number for number, shape in enumerate(dict.fromkeys(shapes.values()))}
        columns = tuple(
            ((Piece(full_box(shape), "", (0,) * len(shape)),),) * len(here) for shape in kinds
        )
        tensors = {name: (CARRIED + name, kinds[shape]) for name, shape in shapes.items()}
        carried = TensorLayout(shapes, PieceTable(here, columns, tensors))
        return own.beside(carried)

    def carried_tensors(self) -> dict[str, TensorInFiles]:
        """Return the carried tensors by their local names in `all_tensors`."""
        return {CARRIED + name: TensorInFiles(self.source, name) for name in self.carried}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes of the carried tensors, by name."""
        return {name: self.source.dtypes[name] for name in self.carried}


def _piece(part: StoredTensor, piece: Piece) -> Piece | None:
    if (shared := intersect_boxes(piece.box, part.box)) is None:
        return None
    tensor, start = piece.at(shared)
    first, start = start[: part.lacking], start[part.lacking :]
    return Piece(part.inside(shared), "/".join([tensor, *map(str, first)]), start)


def select_local_tensor(parts: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a local tensor of `StorageFormat.layout`, from the parameters that this rank holds."""
    parameter, *indices = name.split("/")
    return parts[parameter][tuple(map(int, indices))]


def limit_file_bytes(stem: str, file_bytes: int) -> int:
    """Return the most bytes of one file; peft opens a single one, so adapters are never split."""
    return sys.maxsize if stem == _ADAPTER_STEM else file_bytes


def find_storage_format(
    model: PreTrainedModel,
    shapes: Mapping[str, tuple[int, ...]],
    source: TensorReader | None = None,
) -> StorageFormat | None:
    """Return the form in which a model is saved whose parameters have these names and shapes: that
    of the files which it was read from, else that of transformers, or peft; None if tensors of
    files are not parts of the parameters.

    Args:
        source: The files that the model was read from.
    """
    if has_adapters(model):
        names = find_peft_names(model, shapes)
        return StorageFormat(
            _ADAPTER_STEM,
            tuple(_whole_part(stored, name, shapes[name]) for name, stored in names.items()),
        )
    found = {} if source is None else as_read(model, shapes, source.shapes)
    new = {name: shape for name, shape in shapes.items() if name not in found}
    made = _converted(model, new) if new else ()
    if made is None:
        return None
    for part in made:
        found.setdefault(part.parameter, []).append(part)
    parts = tuple(part for name in shapes for part in found[name])
    if source is None:
        return StorageFormat(MODEL_STEM, parts)
    here = {part.name for part in parts}
    here |= {name for name in source.shapes if is_replaced(model, name)}
    return StorageFormat(
        MODEL_STEM, parts, source, tuple(n for n in source.shapes if n not in here)
    )


def as_read(
    model: PreTrainedModel,
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, tuple[int, ...]],
) -> dict[str, list[StoredTensor]]:
    """Return the tensors that each parameter was read from, and those that are tied to it.

    Args:
        shapes: Of the parameters.
        stored: Shapes of the tensors in the files.
    """
    found = {
        name: list(parts)
        for name, parts in find_stored_tensors(model, shapes, stored).items()
        if all(stored[part.name] == part.shape for part in parts)
    }
    tied = model.all_tied_weights_keys
    if tied:
        used = {part.name for parts in found.values() for part in parts}
        others = _renamed(model, [name for name in stored if name not in used])
        for name, other in others.items():
            if (owner := tied.get(name)) in shapes and stored[other] == shapes[owner]:
                found.setdefault(owner, []).append(_whole_part(other, owner, shapes[owner]))
    return found


def is_replaced(model: PreTrainedModel, stored: str) -> bool:
    """Return whether a stored tensor is of a head over the vocabulary that the model, which has a
    scalar head, leaves out."""
    is_head = stored.rpartition(".")[0].rpartition(".")[2] == OUTPUT
    return is_head and model.get_output_embeddings() is None


def plain_storage_format(stem: str, shapes: Mapping[str, tuple[int, ...]]) -> StorageFormat:
    """Return the form of files that hold every parameter as it is."""
    return StorageFormat(stem, tuple(_whole_part(name, name, of) for name, of in shapes.items()))


def find_stored_tensors(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], stored: Iterable[str]
) -> dict[str, tuple[StoredTensor, ...]]:
    """Return for each parameter that is in files the tensors that it is in, whole or in parts.

    Args:
        shapes: Of the parameters, by name.
        stored: Names of the tensors in the files.
    """
    there = {name: name for name in stored}
    found = _whole_parts(shapes, there)
    others = {name: shape for name, shape in shapes.items() if name not in found}
    if not others:
        return found
    divided = _divided(model, others)
    if len(divided) < len(others) or any(p.name not in there for parts in divided for p in parts):
        there |= _renamed(model, [name for name in there if name not in shapes])
        found |= _whole_parts(others, there)
    for parts in divided:
        if parts[0].parameter in found:
            continue
        names = _renamed(model, [p.name for p in parts]) if parts[0].name not in there else {}
        canonical = {before: after for after, before in names.items()}
        here = [there.get(canonical.get(part.name, part.name)) for part in parts]
        if all(name is not None for name in here):
            found[parts[0].parameter] = tuple(
                part._replace(name=str(name)) for part, name in zip(parts, here, strict=True)
            )
    return found


def _whole_parts(
    shapes: Mapping[str, tuple[int, ...]], there: Mapping[str, str]
) -> dict[str, tuple[StoredTensor, ...]]:
    return {
        name: (_whole_part(there[remove_adapter_prefix(name)], name, shape),)
        for name, shape in shapes.items()
        if remove_adapter_prefix(name) in there
    }


def _divided(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]
) -> list[list[StoredTensor]]:
    """Return the tensors that transformers makes of each of these parameters."""
    by_stored_name = {remove_adapter_prefix(name): name for name in shapes}
    found: dict[str, list[StoredTensor]] = {}
    for part in _converted(model, {s: shapes[name] for s, name in by_stored_name.items()}) or ():
        name = by_stored_name[part.parameter]
        found.setdefault(name, []).append(part._replace(parameter=name))
    return list(found.values())


def _renamed(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Return names of tensors in files by what transformers calls them while it reads them, before
    it puts experts together: files that were published long ago have other names than it saves."""
    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    known, prefix = model.state_dict(), model.base_model_prefix
    return {rename_source_key(name, renamings, [], prefix, known)[0]: name for name in stored}


def remove_adapter_prefix(name: str) -> str:
    """Return the name in the model's own files of a parameter that has an adapter beside it."""
    return name.replace(".base_layer.", ".")


def has_converted_tensors(model: PreTrainedModel) -> bool:
    """Return whether files have other tensors than the parameters, such as each expert alone."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return any(isinstance(one, WeightConverter) for one in conversions)


def _whole_part(name: str, parameter: str, shape: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(name, parameter, full_box(shape), tuple(shape))


def _converted(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[StoredTensor, ...] | None:
    """Return the tensors that transformers makes of these parameters; None if it does not only
    divide and rename them, or leaves some out."""
    mine = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {storage_id(tensor): name for name, tensor in mine.items()}
    with _CopiesAreViews():
        stored = revert_weight_conversion(model, dict(mine))
    left_out = set(model._keys_to_ignore_on_save or ())
    parts, covered = [], Counter[str]()
    for name, tensor in stored.items():
        if name in left_out:
            continue
        owner = owners.get(storage_id(tensor))
        box = None if owner is None else find_view_box(tensor, mine[owner])
        if owner is None or box is None:
            return None
        parts.append(StoredTensor(name, owner, box, tuple(tensor.shape)))
        covered[owner] += box_numel(box)
    if any(covered[name] != tensor.numel() for name, tensor in mine.items()):
        return None
    return tuple(parts)


class _CopiesAreViews(TorchDispatchMode):
    """A dispatch mode in which a copy of a tensor is a view, so that elements can be traced."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.clone.default:
            return args[0].view_as(args[0])
        return func(*args, **(kwargs or {}))
