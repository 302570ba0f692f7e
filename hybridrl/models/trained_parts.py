"""What of a model's folder is trained, and what stays as it is, in a sentence for the user."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.checkpoint.reading import TensorFiles
from hybridrl.models.language_model import build_language_model
from hybridrl.models.stored_names import parts_in_files, stored_form

MOST_NAMED = 4
"""So many parts of a model are named; of more, their number is."""


def trained_parts(path: str, config: PretrainedConfig, *, adapters: bool) -> str:
    """What is trained of a folder that has more than a language model; empty if it has not, or if
    its files cannot say.

    Args:
        adapters: These alone are trained, and saved.
    """
    if not Path(path).is_dir() or getattr(config, "quantization_config", None):
        return ""
    files = TensorFiles(Path(path))
    with torch.device("meta"):
        model = build_language_model(config, dtype=torch.float32)
    frozen = _frozen(model, files)
    if not frozen:
        return ""
    count = sum(p.numel() for p in model.parameters())
    size = sum(math.prod(files.shapes[name]) for name in frozen)
    parts = list(dict.fromkeys(map(_part_of, frozen)))
    named = " and ".join(parts) if len(parts) <= MOST_NAMED else f"{len(parts)} other parts"
    trained = "Adapters of the language model are" if adapters else "The language model is"
    frozen_so = "Frozen" if adapters else "Frozen, and saved with it as they are"
    return (
        f"{trained} trained ({count:,} parameters of {type(model).__name__}). "
        f"{frozen_so}: {named} ({size:,} parameters)."
    )


def _frozen(model: PreTrainedModel, files: TensorFiles) -> list[str]:
    """Names of the tensors that are in files and not in the model."""
    form = stored_form(model, {n: tuple(p.shape) for n, p in model.named_parameters()}, files)
    if form is None or not form.carried:
        return []
    own = {name: tuple(tensor.shape) for name, tensor in model.named_buffers()}
    read = parts_in_files(model, own, form.carried).values()
    used = {part.name for parts in read for part in parts}
    return [name for name in form.carried if name not in used]


def _part_of(name: str) -> str:
    """The part of a model that a tensor belongs to: a tower, a projector, a further layer."""
    places = [place for place in name.split(".") if place not in ("model", "language_model")]
    first, second = [*places, ""][:2]
    return f"{first}.{second}" if first == "layers" else first
