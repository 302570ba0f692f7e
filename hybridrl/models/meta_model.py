"""Models without weights, on the meta device, which are cut over ranks before anything is read.

Parameters are on torch's meta device: they have shapes and take no memory. What is not in files is
real: buffers, and the scalar head of a model that had none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Container
from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.layout.boxes import full_box
from hybridrl.models.language_model import build_meta_language_model
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.stored_tensors import find_stored_tensors

_SCALAR_HEAD_WEIGHT = "score.weight"
"""The scalar head. It is small, and every rank reads it whole."""

_log = logging.getLogger(__name__)


def build_meta_model(
    path: str, config: PretrainedConfig, *, scalar: bool
) -> tuple[PreTrainedModel, TensorReader] | None:
    """Build the model at `path` without its weights, in float32 and with packed attention, and
    return the files in which each meta parameter stands, in one tensor or in several.

    None, with the reason in the log, if only transformers can read them: from a hub, from other
    than safetensors files, quantised, or as tensors that are no parts of the parameters.

    Args:
        config: Of the model.
        scalar: It is to have a scalar head, of zeros if the files have none.

    Raises:
        ConfigError: if a file is damaged.
    """
    if not Path(path).is_dir():
        return _left_to_transformers(path, "it is not a folder")
    if getattr(config, "quantization_config", None):
        return _left_to_transformers(path, "it is quantised")
    files = TensorReader(Path(path))
    if not files.shapes:
        return _left_to_transformers(path, "it has no safetensors files")
    try:
        model = build_meta_language_model(
            config, scalar=scalar, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
        )
    except ValueError as error:
        return _left_to_transformers(path, str(error))
    parameters = dict(model.named_parameters())
    if scalar and _SCALAR_HEAD_WEIGHT not in parameters:
        return _left_to_transformers(path, f"its head is not `{_SCALAR_HEAD_WEIGHT}`")
    wanted = {
        name: p for name, p in parameters.items() if not (scalar and name == _SCALAR_HEAD_WEIGHT)
    }
    found = find_stored_tensors(model, {n: tuple(p.shape) for n, p in wanted.items()}, files.shapes)
    for name in wanted:
        parts = found.get(name, ())
        if not parts or any(files.shapes[part.name] != part.shape for part in parts):
            return _left_to_transformers(path, f"`{name}` is not in it as the model has it")
    tied = model.all_tied_weights_keys.keys()
    kept = {
        name: tuple(buffer.shape)
        for name, buffer in model.state_dict().items()
        if name not in parameters and name not in tied
    }
    buffers = find_stored_tensors(model, kept, files.shapes)
    for name, shape in kept.items():
        if [part.shape for part in buffers.get(name, ())] != [shape]:
            return _left_to_transformers(path, f"`{name}` is no parameter")
    alike = [name for name in files.shapes if _end(name) in list(map(_end, tied))]
    if twice := sorted(find_stored_tensors(model, dict.fromkeys(tied, ()), alike)):
        return _left_to_transformers(path, f"`{twice[0]}` is tied, and in it besides")
    if (buffer := _compute_buffers(model, kept)) is not None:
        return _left_to_transformers(path, f"`{buffer}` is not computed by its class")
    for name, (part,) in buffers.items():
        files.read(part.name, full_box(part.shape), model.get_buffer(name))
    if scalar:
        _read_head(model, files)
    _read_generation_config(model, path)
    return model.eval(), files


def _end(name: str) -> list[str]:
    return name.split(".")[-2:]


def read_whole_parameter(model: PreTrainedModel, name: str, files: TensorReader) -> torch.Tensor:
    """Read a parameter that is on the meta device, in full, on the CPU and in float32."""
    shape = tuple(model.get_parameter(name).shape)
    found = torch.empty(shape, dtype=torch.float32)
    for part in find_stored_tensors(model, {name: shape}, files.shapes)[name]:
        into = found[tuple(slice(*side) for side in part.box)][(0,) * part.lacking]
        files.read(part.name, full_box(part.shape), into)
    return found


def _left_to_transformers(path: str, why: str) -> None:
    _log.info("Every rank reads the whole of %s, by transformers' own loading: %s.", path, why)


def _compute_buffers(model: PreTrainedModel, kept: Container[str]) -> str | None:
    """Compute the buffers that constructors cannot on the meta device, as `from_pretrained` does.

    Args:
        kept: Names of those that are in files.

    Returns:
        The first buffer that nothing has been written to; None if there is no such.
    """
    unwritten = {}
    for module in model.modules():
        # A module may compute the buffers of those inside it.
        module._is_hf_initialized = not any(buffer.is_meta for buffer in module.buffers())
    for path, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                blank = torch.full(buffer.shape, _mark(buffer.dtype), dtype=buffer.dtype)
                setattr(module, name, blank)
                if f"{path}.{name}" not in kept:
                    unwritten[f"{path}.{name}"] = blank.clone()
    model.initialize_weights()  # of the modules that are not
    buffers = dict(model.named_buffers())
    return next(
        (name for name, blank in unwritten.items() if _is_blank(buffers[name], blank)), None
    )


def _mark(dtype: torch.dtype) -> float | int | bool:
    """Return a value that no class computes."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return True if dtype is torch.bool else torch.iinfo(dtype).min


def _is_blank(buffer: torch.Tensor, blank: torch.Tensor) -> bool:
    if blank.dtype is torch.bool or not blank.numel():
        return False
    return bool(torch.isnan(buffer).any() if blank.is_floating_point() else (buffer == blank).any())


def _read_head(model: PreTrainedModel, files: TensorReader) -> None:
    head = torch.zeros(model.score.weight.shape)
    if files.shapes.get(_SCALAR_HEAD_WEIGHT) == tuple(head.shape):
        files.read(_SCALAR_HEAD_WEIGHT, full_box(head.shape), head)
    model.score.weight = nn.Parameter(head)


def _read_generation_config(model: PreTrainedModel, path: str) -> None:
    if model.can_generate() and (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
