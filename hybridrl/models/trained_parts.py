"""A sentence for the user about the parts of a model's folder that are trained, and those that stay
as they are."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import torch
from transformers import PretrainedConfig

from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.models.language_model import build_meta_language_model
from hybridrl.models.stored_tensors import as_read, find_storage_format

COMPUTED = "rotary_emb.inv_freq"
"""What old files have besides, and no model reads."""
MOST_NAMED = 4
"""So many parts of a model are named; of more, their number is."""


def trained_parts(path: str, config: PretrainedConfig, *, adapters: bool) -> str:
    """Describe what is trained of a folder that has more than a language model, and what is lost of
    it; empty if it has not more, or if its files cannot say.

    Args:
        adapters: These alone are trained, and saved.
    """
    if not Path(path).is_dir() or getattr(config, "quantization_config", None):
        return ""
    model = build_meta_language_model(config, dtype=torch.float32)
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if find_storage_format(model, own) is None:
        said = f"{type(model).__name__} is saved as transformers writes it, so what {path} has "
        return "" if adapters else f"{said}besides the tensors of that class is left out."
    carried = TensorReader(Path(path)).shapes
    stored = carried or _shapes_in_pickles(Path(path))
    if carried:
        own |= {name: tuple(buffer.shape) for name, buffer in model.named_buffers()}
    read = as_read(model, own, stored).values()
    used = {part.name for parts in read for part in parts}
    frozen = [name for name in stored if name not in used and not name.endswith(COMPUTED)]
    if not frozen:
        return ""
    count = sum(p.numel() for p in model.parameters())
    size = sum(math.prod(stored[name]) for name in frozen)
    parts = list(dict.fromkeys(map(_part_of, frozen)))
    named = " and ".join(parts) if len(parts) <= MOST_NAMED else f"{len(parts)} other parts"
    trained = "Adapters of the language model are" if adapters else "The language model is"
    frozen_so, cure = "Frozen" if adapters else "Frozen, and saved with it as they are", ""
    if not carried and not adapters:
        frozen_so = "Not saved with it, for only safetensors files are copied from"
        cure = f" To keep them, write the tensors of {path} to a safetensors file first."
    return (
        f"{trained} trained ({count:,} parameters of {type(model).__name__}). "
        f"{frozen_so}: {named} ({size:,} parameters).{cure}"
    )


def _shapes_in_pickles(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors in files of `torch.save`, without files that can only be read
    whole."""
    found: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("pytorch_model*.bin"):
        with contextlib.suppress(Exception):  # what is wrong with it is told elsewhere
            tensors = torch.load(file, map_location="meta", mmap=True, weights_only=True)
            found |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return found


def _part_of(name: str) -> str:
    """Name the part of a model that a tensor belongs to: a tower, a projector, a further layer."""
    places = [place for place in name.split(".") if place not in ("model", "language_model")]
    first, second = [*places, ""][:2]
    return f"{first}.{second}" if first == "layers" else first
