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
from transformers.core_model_loading import revert_weight_conversion

from hybridrl.checkpoint.agreement import agreed, explained
from hybridrl.checkpoint.reading import TensorFiles
from hybridrl.checkpoint.writing import write_tensors
from hybridrl.core.boxes import volume
from hybridrl.core.layout import Layout
from hybridrl.errors import ConfigError
from hybridrl.parallel.layout import box_of
from hybridrl.parallel.mesh import ParallelMesh
from hybridrl.parallel.tensor import Cut

_log = logging.getLogger(__name__)


def is_stored_as_named(model: PreTrainedModel, layout: Layout) -> bool:
    """Whether transformers saves the parameters as they are. Of some models it saves others, such
    as each expert of a layer alone."""
    mine = {name: torch.empty(shape, device="meta") for name, shape in layout.shapes.items()}
    stored = revert_weight_conversion(model, mine)
    left_out = set(model._keys_to_ignore_on_save or ())
    kept = {name: tuple(tensor.shape) for name, tensor in stored.items() if name not in left_out}
    return kept == dict(layout.shapes)


def save_model(
    model: PreTrainedModel,
    layout: Layout,
    parts: Mapping[str, Tensor],
    mesh: ParallelMesh,
    folder: Path,
) -> None:
    """Writes a model's configuration and weights, float32. Collective.

    Args:
        model: This rank's part, for the configuration.
        layout: Of all ranks, under the names of a checkpoint.
        parts: What this rank holds, by name.

    Raises:
        StorageError: on all ranks, if one could not write.
    """
    with agreed(mesh.group()), explained(folder):
        if mesh.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            # As `save_pretrained` does, which cannot do without the weights.
            model.config.dtype = "float32"
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
    write_tensors(folder, layout, mesh.place, parts.__getitem__, torch.float32, mesh.group())


def read_parameters(
    files: TensorFiles,
    parameters: Mapping[str, nn.Parameter],
    cuts: Mapping[str, Cut],
    index: int,
) -> set[str]:
    """Fills this rank's parameters from files, as far as they have them.

    Args:
        parameters: By their names in a checkpoint, sharded by FSDP or not.
        cuts: Of those that are cut over tensor-parallel ranks.
        index: This rank's place among these.

    Returns:
        The names that the files do not have.

    Raises:
        ConfigError: if a tensor has another shape; nothing is read then. Or as `TensorFiles`.
    """
    found = parameters.keys() & files.shapes.keys()
    for name in sorted(found):
        cut = cuts.get(name)
        whole = tuple(parameters[name].shape) if cut is None else cut.shape
        if files.shapes[name] != whole:
            raise ConfigError(
                f"{files.folder} has `{name}` of the shape {list(files.shapes[name])}, and the "
                f"model's is {list(whole)}. Give the folder of a model of the same size."
            )
    for name, parameter in parameters.items():
        box = box_of(parameter, cuts.get(name), index)
        if name in found and volume(box):
            local = parameter.detach()
            files.read(name, box, local.to_local() if isinstance(local, DTensor) else local)
    return parameters.keys() - found


def load_weights(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    cuts: Mapping[str, Cut],
    index: int,
) -> None:
    """Takes the weights that a folder and this rank's part of a model have in common. Those that
    only the model has stay as they are, with a warning in the log.

    Args:
        parameters, cuts, index: See `read_parameters`.

    Raises:
        ConfigError: if they have none in common, or one has another shape; names the folder.
    """
    files = TensorFiles(folder)
    missing = read_parameters(files, parameters, cuts, index)
    if len(missing) == len(parameters):
        raise ConfigError(
            f"{folder} has no weights for this model: none of its safetensors files' tensors "
            f"is called as one of the model's, such as `{min(parameters)}`. Give the folder of "
            "a model of the same architecture, saved with save_pretrained."
        )
    if missing:
        _log.warning(
            "%s has no weights for %d of the model's %d parameters, which stay as they were: %s",
            *(folder, len(missing), len(parameters), ", ".join(sorted(missing)[:5])),
        )
