"""`hybridrl checkpoint export`: the model of a role as a Hugging Face folder of its own."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.checkpoint.tensors.file_plan import MODEL
from hybridrl.checkpoint.tensors.rank_manifest import CARRIED
from hybridrl.checkpoint.tensors.remote_files import TensorsApart, open_lists, open_tensors
from hybridrl.checkpoint.tensors.tensor_reader import TensorFiles
from hybridrl.checkpoint.tensors.tensor_writer import write_tensors
from hybridrl.commands.steps import one_step, settings_of, show, show_json
from hybridrl.errors import ConfigError
from hybridrl.layout.boxes import whole
from hybridrl.layout.tensor_layout import Layout
from hybridrl.layout.tensor_pieces import local_pieces
from hybridrl.system.dtypes import DTYPES, with_dtype
from hybridrl.system.formatting import readable_bytes
from hybridrl.system.locations import Location, write_whole
from hybridrl.system.storage import explain_write_errors

ADAPTER = "adapter_model"
NUMBERS = "training.json"
OF_TRAINING = (NUMBERS, "generations.json")
"""What a model's folder has no use for."""


def export(chosen: argparse.Namespace) -> int:
    """`hybridrl checkpoint export`."""
    run, folders, step = one_step(chosen.step)
    target = Path(chosen.folder)
    if chosen.dtype is None:
        chosen.dtype = _saved_dtype(settings_of(run))
    if chosen.dtype not in DTYPES:
        raise ConfigError(f"--dtype {chosen.dtype}: must be one of {', '.join(DTYPES)}.")
    if not 0 < chosen.file_gib < math.inf:
        raise ConfigError(f"--file-gib {chosen.file_gib:g}: must be a number of more than 0.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already, and is not empty. Name a new folder.")
    files = folders.completed(step).files
    roles = sorted({name.split("/")[0] for name in files if "/" in name})
    if chosen.role not in roles:
        raise ConfigError(f"--role {chosen.role}: step {step} has {', '.join(roles)}.")
    source, dtype = folders.at(step) / chosen.role, DTYPES[chosen.dtype]
    tensors, stem = _model(source)
    with explain_write_errors(target):
        _copy_description(source, _beside(files, chosen.role), target, chosen.dtype)
        numbers = json.loads((source / NUMBERS).read_text(encoding="utf-8"))
        carried = {name: tensors.dtypes[name] for name in numbers.get(CARRIED, ())}
        size = _write(tensors, target, stem, dtype, int(chosen.file_gib * 2**30), carried)
    found = {"step": step, "role": chosen.role, "folder": str(target), "bytes": size}
    if chosen.json:
        return show_json(found)
    return show(f"{target}: {chosen.role} of step {step}, {readable_bytes(size)} of {chosen.dtype}")


def _saved_dtype(settings: dict[str, Any]) -> str:
    """The dtype in which a run of these settings leaves its model: a model made from the seed is of
    float32, others are saved as they are stored."""
    model = settings.get("model") or {}
    if model.get("save_dtype") or not model.get("path"):
        return str(model.get("save_dtype") or "float32")
    try:
        stored = json.loads((Path(model["path"]) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "bfloat16"  # a name of the hub, most likely, where most models are stored so
    dtype = stored.get("dtype") or stored.get("torch_dtype")
    return dtype if dtype in DTYPES else "float32"


def _model(folder: Location) -> tuple[TensorFiles | TensorsApart, str]:
    for stem in (MODEL, ADAPTER):
        if (found := _open(folder, stem)) is not None:
            return found, stem
    raise ConfigError(
        f"{folder} holds parameters in another form than transformers stores them in. Resume the "
        "run with trainer.steps at this step: it leaves the model in its model/."
    )


def _open(folder: Location, stem: str) -> TensorFiles | TensorsApart | None:
    if isinstance(folder, Path) and not list(folder.glob(f"{stem}*.safetensors")):
        return None
    found = open_tensors(folder, stem, open_lists(folder))
    return found if found.shapes else None


def _beside(files: dict[str, Any], role: str) -> list[str]:
    """The small files that make a model folder of tensors."""
    names = [name.split("/", 1)[1] for name in files if name.startswith(f"{role}/")]
    return [
        name
        for name in names
        if not name.endswith((".safetensors", ".safetensors.index.json"))
        and not name.startswith("rank-")
        and name not in OF_TRAINING
    ]


def _copy_description(source: Location, names: list[str], target: Path, dtype: str) -> None:
    for name in names:
        text = (source / name).read_text(encoding="utf-8")
        if name == "config.json":
            text = json.dumps(with_dtype(json.loads(text), dtype), indent=2) + "\n"
        write_whole(target / name, text.encode())


def _write(
    tensors: TensorFiles | TensorsApart,
    target: Path,
    stem: str,
    dtype: torch.dtype,
    file_bytes: int,
    carried: Mapping[str, torch.dtype],
) -> int:
    """Needs memory for one tensor. Gives the bytes of all.

    Args:
        carried: Precisions of tensors that stay as they are.
    """

    @lru_cache(maxsize=1)
    def read(name: str) -> Tensor:
        own = carried.get(name, torch.float32)
        tensor = torch.empty(tensors.shapes[name], dtype=own)
        tensors.read(name, whole(tensor.shape), tensor)
        return tensor

    shapes = {name: tuple(shape) for name, shape in tensors.shapes.items()}
    mine = {name: local_pieces(name, whole(shape)) for name, shape in shapes.items()}
    layout = Layout(shapes, {0: mine})
    write_tensors(target, layout, 0, read, dtype, None, file_bytes, stem, carried)
    return sum(path.stat().st_size for path in target.glob(f"{stem}*.safetensors"))
