"""`hybridrl checkpoint inspect`: what a step holds, from its lists alone; no tensor is read."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.table import Table

from hybridrl.checkpoint.tensors.rank_manifest import read_lists
from hybridrl.commands.steps import one_step, show, show_json
from hybridrl.errors import ConfigError
from hybridrl.system.formatting import readable_bytes
from hybridrl.system.locations import Location


def inspect(chosen: argparse.Namespace) -> int:
    """`hybridrl checkpoint inspect`."""
    _, folders, step = one_step(chosen.step)
    try:
        noted = folders.completed(step)
        roles = {}
        for role in sorted({name.split("/")[0] for name in noted.files if "/" in name}):
            inside = [name for name in noted.files if name.startswith(f"{role}/")]
            roles[role] = _role(folders.at(step) / role, [name.split("/", 1)[1] for name in inside])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folders.at(step)} is damaged: {error}.") from error
    if chosen.json:
        metrics = noted.figures
        return show_json(
            {"step": step, "bytes": noted.bytes, "time": noted.time, "metrics": metrics} | roles
        )
    size = readable_bytes(noted.bytes)
    show(f"step {step} in {folders.path}: {size} in {len(noted.files)} files")
    for role, found in roles.items():
        show(f"\n{role}, written by {found['ranks']} ranks; {_as_text(found['counters'])}")
        table = Table("tensor", "dtype", "shape", "boxes", "file")
        for name, tensor in found["tensors"].items():
            shape = " x ".join(map(str, tensor["shape"])) or "()"
            boxes = str(len(tensor["boxes"]))
            table.add_row(name, tensor["dtype"], shape, boxes, ", ".join(tensor["files"]))
        show(table)
    return 0


def _role(folder: Location, files: list[str]) -> dict[str, Any]:
    lists = read_lists(folder)
    tensors: dict[str, Any] = {}
    for rank, one in enumerate(lists):
        for box in one.boxes:
            known = {"dtype": box.dtype, "shape": box.shape, "files": [], "boxes": []}
            tensor = tensors.setdefault(box.tensor, known)
            file = one.file_of(box)
            if file not in tensor["files"]:
                tensor["files"].append(file)
            tensor["boxes"].append({"rank": rank, "box": box.box})
    return {"ranks": len(lists), "counters": _counters(folder, files), "tensors": tensors}


def _counters(folder: Location, files: list[str]) -> dict[str, Any]:
    """The plain numbers that a role keeps: small JSON files that are not those of its model."""
    found: dict[str, Any] = {}
    for name in files:
        if name in ("training.json", "generations.json"):
            found |= json.loads((folder / name).read_text(encoding="utf-8"))
    return found


def _as_text(counters: dict[str, Any]) -> str:
    inner = counters.get("counters", {})
    return ", ".join(f"{k} {v}" for k, v in {**counters, **inner}.items() if k != "counters")
