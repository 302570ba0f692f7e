"""A model that is cut over ranks, to a Hugging Face folder and from one.

Every rank writes and reads what it holds, so that none needs memory for the whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hybridrl.checkpoint.agreement import agreed, explained
from hybridrl.checkpoint.reading import TensorFiles
from hybridrl.checkpoint.writing import write_tensors
from hybridrl.core.boxes import volume
from hybridrl.core.layout import Layout
from hybridrl.errors import ConfigError
from hybridrl.models import PackedModel
from hybridrl.models.adapters import ADAPTER, has_adapters
from hybridrl.models.stored_names import (
    StoredForm,
    is_stored_as_named,
    most_bytes,
    stored_name,
)
from hybridrl.parallel.layout import box_of
from hybridrl.parallel.mesh import ParallelMesh
from hybridrl.parallel.tensor import Cut

_log = logging.getLogger(__name__)


def save_model(
    model: PreTrainedModel,
    form: StoredForm,
    layout: Layout,
    parts: Mapping[str, Tensor],
    mesh: ParallelMesh,
    folder: Path,
    dtype: torch.dtype,
    file_bytes: int,
) -> None:
    """Writes a model's configuration and weights, or its adapters. Collective.

    Args:
        model: This rank's part, for the configuration.
        form: Which weights, and their names in the files.
        layout: Of all ranks.
        parts: What this rank holds, by name.
        dtype: Of the weights in the files.
        file_bytes: Largest file, unless one tensor is larger.

    Raises:
        StorageError: on all ranks, if one could not write.
    """
    with agreed(mesh.group()), explained(folder):
        if mesh.is_first:
            describe(model, folder, dtype)
    write_tensors(
        folder,
        layout.renamed(form.names),
        mesh.place,
        parts.__getitem__,
        dtype,
        mesh.group(),
        file_bytes=most_bytes(form.stem, file_bytes),
        stem=form.stem,
    )


def describe(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Writes what a folder has beside weights of this precision, as `save_pretrained` does; that
    cannot do without the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    if has_adapters(model):
        model.peft_config[ADAPTER].save_pretrained(str(folder))
    else:
        model.config.dtype = str(dtype).removeprefix("torch.")
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def fill(
    model: PackedModel,
    files: TensorFiles,
    cuts: Mapping[str, Cut],
    index: int,
    device: torch.device,
) -> None:
    """Gives the parameters that are on the meta device memory, and their values from files.

    Args:
        model: Cut, and sharded by FSDP.
        files: Have all of them.
        cuts: Of parameters that are cut over tensor-parallel ranks.
        index: This rank's place among these.
        device: Where the parameters are to be.
    """
    empty = {name: p for name, p in model.inner.named_parameters() if p.is_meta}
    for parameter in empty.values():
        real = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        # The same object: it may be tied, and FSDP knows it.
        torch.utils.swap_tensors(parameter, real)
    model._apply(lambda tensor: tensor)  # has FSDP look at what it shards again
    _read(files, empty, cuts, index)


def load_weights(model: PreTrainedModel, folder: Path, cuts: Mapping[str, Cut], index: int) -> None:
    """Takes the weights that a folder and this rank's part of a model have in common. Those that
    only the model has stay as they are, with a warning in the log.

    Args:
        cuts, index: See `fill`.

    Raises:
        ConfigError: if they have none in common, one has another shape, or a file is damaged;
            names it.
    """
    files = TensorFiles(folder)
    parameters = dict(model.named_parameters())
    shapes = {name: _whole(parameter, cuts.get(name)) for name, parameter in parameters.items()}
    found = {n: p for n, p in parameters.items() if stored_name(n) in files.shapes}
    if files.shapes and len(found) < len(parameters) and not is_stored_as_named(model, shapes):
        found = _load_whole(model, folder, cuts, index)
    elif found:
        _read(files, found, cuts, index)
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


def _read(
    files: TensorFiles, parameters: Mapping[str, nn.Parameter], cuts: Mapping[str, Cut], index: int
) -> None:
    for name, parameter in parameters.items():
        _check_shape(files.folder, name, files.shapes[stored_name(name)], parameter, cuts.get(name))
    for name, parameter in parameters.items():
        box = box_of(parameter, cuts.get(name), index)
        if volume(box):
            files.read(stored_name(name), box, _local(parameter))


@torch.no_grad()
def _load_whole(
    model: PreTrainedModel, folder: Path, cuts: Mapping[str, Cut], index: int
) -> dict[str, nn.Parameter]:
    """Fills the parameters of a model that transformers saves under other names, and gives those
    that the folder has. Every rank reads all of it."""
    _log.info("Every rank reads the whole of %s, by transformers' own loading.", folder)
    read, report = type(model).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    values = read.state_dict()
    parameters = dict(model.named_parameters())
    found = {
        name: parameter
        for name, parameter in parameters.items()
        if stored_name(name) in values.keys() - set(report["missing_keys"])
    }
    for name, parameter in found.items():
        whole, cut = values[stored_name(name)], cuts.get(name)
        _check_shape(folder, name, tuple(whole.shape), parameter, cut)
        place = tuple(slice(*side) for side in box_of(parameter, cut, index))
        _local(parameter).copy_(whole[place])
    return found


def _check_shape(
    folder: Path, name: str, found: tuple[int, ...], parameter: nn.Parameter, cut: Cut | None
) -> None:
    if found != (wanted := _whole(parameter, cut)):
        raise ConfigError(
            f"{folder} has `{name}` of the shape {list(found)}, and the model's is "
            f"{list(wanted)}. Give the folder of a model of the same size."
        )


def _whole(parameter: nn.Parameter, cut: Cut | None) -> tuple[int, ...]:
    return tuple(parameter.shape) if cut is None else cut.shape


def _local(parameter: nn.Parameter) -> Tensor:
    """What this rank holds, to be written to."""
    here = parameter.detach()
    return here.to_local() if isinstance(here, DTensor) else here
