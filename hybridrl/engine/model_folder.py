"""Reading and writing the Hugging Face folder of a model that is sharded over ranks.

Every rank writes and reads what it holds, so that none needs memory for the whole model.
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.checkpoint.tensors.tensor_writer import write_tensors
from hybridrl.checkpoint.tensors.write_errors import convert_write_errors, raise_on_all_ranks
from hybridrl.errors import ConfigError, StorageError
from hybridrl.layout.box_table import slice_at
from hybridrl.layout.boxes import box_shape, intersect_boxes
from hybridrl.layout.tensor_layout import Piece, TensorLayout
from hybridrl.models.lora import ADAPTER_NAME, has_adapters
from hybridrl.models.packed_models import PackedModel
from hybridrl.models.stored_tensors import (
    StorageFormat,
    StoredTensor,
    find_stored_tensors,
    has_converted_tensors,
    is_replaced,
    limit_file_bytes,
    remove_adapter_prefix,
    select_local_tensor,
)
from hybridrl.parallel.parameter_layout import find_parameter_pieces, full_shape
from hybridrl.parallel.process_group import ParallelMesh, to_local
from hybridrl.parallel.tensor_parallel import ParameterCut
from hybridrl.system.dtypes import with_dtype

GENERATION = "generation_config.json"
_log = logging.getLogger(__name__)


def save_model_folder(
    model: PreTrainedModel,
    form: StorageFormat,
    layout: TensorLayout,
    parts: Mapping[str, Tensor],
    mesh: ParallelMesh,
    folder: Path,
    dtype: torch.dtype,
    file_bytes: int,
) -> None:
    """Write a model's configuration and weights, or its adapters. Collective.

    Args:
        model: This rank's part, for the configuration.
        form: Which weights, and as which tensors they stand in the files.
        layout: Of all ranks.
        parts: What this rank holds, by name.
        dtype: Of the weights in the files.
        file_bytes: Largest file, unless one tensor is larger.

    Raises:
        StorageError: on all ranks, if one could not write.
    """
    with raise_on_all_ranks(mesh.group()), convert_write_errors(folder):
        if mesh.is_first:
            write_model_config(model, folder, dtype, form.source)
    carried = form.carried_tensors()
    write_tensors(
        folder,
        form.all_tensors(layout),
        mesh.place,
        lambda name: carried[name] if name in carried else select_local_tensor(parts, name),
        dtype,
        mesh.group(),
        file_bytes=limit_file_bytes(form.stem, file_bytes),
        stem=form.stem,
        dtypes=form.dtypes(),
    )
    with raise_on_all_ranks(mesh.group()):
        if mesh.is_first and form.source is not None:
            _check_kept(model, folder, form.source)


def _check_kept(model: PreTrainedModel, folder: Path, source: TensorReader) -> None:
    """Compare a folder that was written with the one that the model came from.

    Raises:
        StorageError: if a tensor is missing.
    """
    written = TensorReader(folder).shapes
    if lost := [n for n in source.shapes if n not in written and not is_replaced(model, n)]:
        raise StorageError(
            f"{folder} lacks {len(lost)} of the tensors of {source.folder}, among them "
            f"`{lost[0]}`, so it is no whole {type(model).__name__}. This is a mistake of "
            "hybridrl: please report it. The newest checkpoint has what was trained."
        )


def write_model_config(
    model: PreTrainedModel, folder: Path, dtype: torch.dtype, source: TensorReader | None = None
) -> None:
    """Write what a folder has beside weights of this precision and a tokenizer: the files of the
    folder that the model came from, or what `save_pretrained` would write, which cannot do without
    the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    if has_adapters(model):
        model.peft_config[ADAPTER_NAME].save_pretrained(str(folder))
    else:
        name = str(dtype).removeprefix("torch.")
        model.config.dtype = name
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if source is not None and model.get_output_embeddings() is not None:
            _describe_as_before(model, folder, name, source.folder)
    if model.can_generate() and not (folder / GENERATION).is_file():
        model.generation_config.save_pretrained(folder)


def _describe_as_before(model: PreTrainedModel, folder: Path, dtype: str, source: Path) -> None:
    described = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if type(model).__name__ not in (described.get("architectures") or ()):
        described["architectures"] = [type(model).__name__]
    text = json.dumps(with_dtype(described, dtype), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    for pattern in (GENERATION, "*processor_config.json"):
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def materialize_parameters(
    model: PackedModel,
    files: TensorReader,
    cuts: Mapping[str, ParameterCut],
    device: torch.device,
) -> None:
    """Allocate the parameters that are on the meta device and read their values from files.

    Args:
        model: Cut, and sharded by FSDP.
        files: Have all of them.
        cuts: Of parameters that are cut over tensor-parallel ranks.
        device: Where the parameters are to be.
    """
    empty = {name: p for name, p in model.inner.named_parameters() if p.is_meta}
    for parameter in empty.values():
        real = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        # The same object: it may be tied, and FSDP knows it.
        torch.utils.swap_tensors(parameter, real)
    model._apply(lambda tensor: tensor)  # has FSDP look at what it shards again
    _read(files, empty, _find_stored_parts(model.inner, empty, files, cuts), cuts)


def load_model_folder(
    model: PreTrainedModel, folder: Path, cuts: Mapping[str, ParameterCut]
) -> None:
    """Load the weights that a folder and this rank's part of a model have in common. Parameters
    that the folder lacks stay as they are, with a warning in the log.

    Args:
        cuts: See `materialize_parameters`.

    Raises:
        ConfigError: if they have none in common, one has another shape, or a file is damaged;
            names it.
    """
    files = TensorReader(folder)
    parameters = dict(model.named_parameters())
    parts = _find_stored_parts(model, parameters, files, cuts)
    found = {name: parameter for name, parameter in parameters.items() if name in parts}
    if files.shapes and len(found) < len(parameters) and has_converted_tensors(model):
        found = _load_whole(model, folder, cuts)
    elif found:
        _read(files, found, parts, cuts)
    else:
        raise ConfigError(
            f"{folder} has no weights for this model: none of its safetensors files' tensors "
            f"is called as one of the model's, such as `{min(parameters)}`. Give the folder of "
            "a model of the same architecture, saved with save_pretrained."
        )
    if missing := sorted(parameters.keys() - found.keys()):
        _log.warning(
            "%s has no weights for %d of the model's %d parameters, which stay as they were: %s",
            *(folder, len(missing), len(parameters), ", ".join(missing[:5])),
        )


def _find_stored_parts(
    model: PreTrainedModel,
    parameters: Mapping[str, nn.Parameter],
    files: TensorReader,
    cuts: Mapping[str, ParameterCut],
) -> dict[str, tuple[StoredTensor, ...]]:
    shapes = {name: full_shape(parameter, cuts.get(name)) for name, parameter in parameters.items()}
    return find_stored_tensors(model, shapes, files.shapes)


def _read(
    files: TensorReader,
    parameters: Mapping[str, nn.Parameter],
    parts: Mapping[str, tuple[StoredTensor, ...]],
    cuts: Mapping[str, ParameterCut],
) -> None:
    for name in parameters:
        for part in parts[name]:
            _check_shape(files.folder, part.name, files.shapes[part.name], part.shape)
    for name, parameter in parameters.items():
        pieces = find_parameter_pieces(name, parameter, cuts.get(name))
        read_parameter_pieces(files, parts[name], pieces, to_local(parameter.detach()))


def read_parameter_pieces(
    files: TensorReader,
    parts: Iterable[StoredTensor],
    pieces: Iterable[Piece],
    local: Tensor,
) -> None:
    """Read the pieces of a parameter that a rank holds.

    Args:
        parts: The tensors in files that the parameter is in.
        pieces: What the rank holds, in `local`.
    """
    for piece, part in itertools.product(pieces, parts):
        if (shared := intersect_boxes(piece.box, part.box)) is None:
            continue
        into = slice_at(local, piece.at(shared).start, box_shape(shared))
        files.read(part.name, part.inside(shared), into[(0,) * part.lacking])


@torch.no_grad()
def _load_whole(
    model: PreTrainedModel, folder: Path, cuts: Mapping[str, ParameterCut]
) -> dict[str, nn.Parameter]:
    """Load a model that transformers saves under other names, and return the parameters that the
    folder has. Every rank reads the whole folder."""
    _log.info("Every rank reads the whole of %s, by transformers' own loading.", folder)
    read, report = type(model).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    values = read.state_dict()
    parameters = dict(model.named_parameters())
    found = {
        name: parameter
        for name, parameter in parameters.items()
        if remove_adapter_prefix(name) in values.keys() - set(report["missing_keys"])
    }
    for name, parameter in found.items():
        whole, cut = values[remove_adapter_prefix(name)], cuts.get(name)
        _check_shape(folder, name, tuple(whole.shape), full_shape(parameter, cut))
        local = to_local(parameter.detach())
        for piece in find_parameter_pieces(name, parameter, cut):
            values_here = whole[tuple(slice(*side) for side in piece.box)]
            slice_at(local, piece.start, values_here.shape).copy_(values_here)
    return found


def _check_shape(folder: Path, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise ConfigError(
            f"{folder} has `{name}` of the shape {list(found)}, and the model's is "
            f"{list(wanted)}. Give the folder of a model of the same size."
        )
