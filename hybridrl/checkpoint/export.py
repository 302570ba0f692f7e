"""The model of a role in a checkpoint, as a Hugging Face folder of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.checkpoint.tensors.file_plan import MODEL_STEM
from hybridrl.checkpoint.tensors.rank_manifest import CARRIED, is_list, list_stems, load_manifests
from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.checkpoint.tensors.tensor_writer import write_tensors
from hybridrl.errors import ConfigError
from hybridrl.layout.boxes import full_box, make_local_pieces
from hybridrl.layout.tensor_layout import TensorLayout
from hybridrl.system.bounded_files import load_json, load_object, read_text
from hybridrl.system.dtypes import DTYPES, with_dtype
from hybridrl.system.locations import Location, write_atomically
from hybridrl.system.storage import explain_write_errors

ADAPTER = "adapter_model"
NUMBERS = "training.json"
OF_TRAINING = (NUMBERS, "generations.json")
"""What a model's folder has no use for."""


def export_model(source: Location, files: list[str], target: Path, dtype: str, most: int) -> int:
    """Write the model of a role to a folder; return the bytes of its weights. Needs memory for one
    tensor.

    Args:
        source: The role's folder in a step.
        files: Names of the files in it.
        dtype: Of the weights, as `torch` calls it.
        most: Bytes of the largest file.

    Raises:
        ConfigError: if the folder has no model.
        StorageError: if it cannot be written.
    """
    tensors, stem = _weights(source)
    with explain_write_errors(target):
        for name in files:
            if name.endswith((".safetensors", ".safetensors.index.json")) or is_list(name):
                continue
            if name not in OF_TRAINING:
                text = read_text(source / name)
                if name == "config.json":
                    text = json.dumps(with_dtype(json.loads(text), dtype), indent=2) + "\n"
                write_atomically(target / name, text.encode())
        numbers = load_object(source / NUMBERS)
        # Of which the precision stays as it is.
        carried = {name: tensors.dtypes[name] for name in numbers.get(CARRIED, ())}

        @lru_cache(maxsize=1)
        def read(name: str) -> Tensor:
            tensor = torch.empty(tensors.shapes[name], dtype=carried.get(name, torch.float32))
            tensors.read(name, full_box(tensor.shape), tensor)
            return tensor

        shapes = {name: tuple(shape) for name, shape in tensors.shapes.items()}
        held = {name: make_local_pieces(name, full_box(shape)) for name, shape in shapes.items()}
        layout = TensorLayout(shapes, {0: held})
        write_tensors(target, layout, 0, read, DTYPES[dtype], None, most, stem, carried)
    return sum(path.stat().st_size for path in target.glob(f"{stem}*.safetensors"))


def saved_dtype(settings: Mapping[str, Any]) -> str:
    """Return the dtype in which a run of these settings leaves its model: a model made from the
    seed is of float32, others are saved as they are stored."""
    model = settings.get("model") or {}
    if model.get("save_dtype") or not model.get("path"):
        return str(model.get("save_dtype") or "float32")
    try:
        stored = load_json(Path(model["path"]) / "config.json")
    except (OSError, ValueError):
        return "bfloat16"  # a name of the hub, most likely, where most models are stored so
    dtype = stored.get("dtype") or stored.get("torch_dtype")
    return dtype if dtype in DTYPES else "float32"


def _weights(folder: Location) -> tuple[TensorReader, str]:
    """Open the weights of a role, or its adapters."""
    lists = load_manifests(folder)
    for stem in (MODEL_STEM, ADAPTER):
        if stem in list_stems(lists):
            return TensorReader(folder, stem, lists), stem
    raise ConfigError(
        f"{folder} holds parameters in another form than transformers stores them in. Resume the "
        "run with trainer.steps at this step: it leaves the model in its model/."
    )
