"""The state of a TrainEngine in a folder: from it training goes on, on any number of ranks, cut in
any way.

    model.safetensors   `weight/<parameter>`, `exp_avg/<parameter>`, `exp_avg_sq/<parameter>`
    training.json       what is a plain number

Tensors are float32 and only of parameters that are trained: with adapters, of those alone. Every
rank writes and reads the boxes that it holds. Before its first optimizer step, and where it never
had a gradient, a parameter has no moments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridrl.checkpoint.agreement import agreed, explained
from hybridrl.checkpoint.reading import TensorFiles
from hybridrl.checkpoint.writing import write_tensors
from hybridrl.core.boxes import extent
from hybridrl.core.layout import Layout
from hybridrl.engine.train import TrainEngine
from hybridrl.errors import ConfigError

NUMBERS = "training.json"
WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""As AdamW calls them."""

_Steps = dict[str, float | None]
"""By parameter: AdamW's count of its steps; None before the first."""


@torch.no_grad()
def save_training_state(
    engine: TrainEngine, folder: Path, counters: Mapping[str, int] | None = None
) -> None:
    """Writes weights, moments and numbers. Collective; all ranks must see the folder.

    Args:
        counters: The caller's own, for `load_training_state` to give back.

    Raises:
        StorageError: on all ranks, if one of them could not write; names the file.
    """
    group, states = engine.mesh.group(), engine.optimizer.state
    local = engine.local_parameters()
    held, mine = {}, _Steps()
    for name, parameter in _trained(engine).items():
        held[f"{WEIGHT}/{name}"] = local[name]
        state = states.get(parameter) or {}
        mine[name] = float(state["step"]) if state else None
        held |= {f"{kind}/{name}": _local(state[kind]) for kind in MOMENTS if state}
    steps = _of_all_ranks(mine, group)
    layout = _layout_of_state(engine.layout(), steps)
    write_tensors(folder, layout, engine.mesh.place, held.__getitem__, torch.float32, group)
    with agreed(group):
        if engine.mesh.is_first:
            numbers = {
                "steps": steps,
                "schedule": engine.schedule.last_epoch,
                "skipped_in_a_row": engine.skipped_in_a_row,
                "counters": dict(counters or {}),
            }
            write_numbers(folder / NUMBERS, numbers)


@torch.no_grad()
def load_training_state(engine: TrainEngine, folder: Path) -> dict[str, int]:
    """Goes on where the engine that was saved stopped: with its weights and moments, and at its
    place in the schedule. Rates are those of this engine's own settings there. Collective.

    Returns:
        The `counters` that were saved.

    Raises:
        ConfigError: if a file is damaged, or the state is that of another model; names the folder
            and the parameter.
    """
    numbers = read_numbers(folder / NUMBERS)
    files = TensorFiles(folder)
    trained, layout, group = _trained(engine), engine.layout(), engine.mesh.group()
    _check_parameters(folder, files, layout, set(_of_all_ranks(dict.fromkeys(trained), group)))
    local, states = engine.local_parameters(), engine.optimizer.state
    for name, parameter in trained.items():
        targets = {WEIGHT: local[name]}
        states.pop(parameter, None)
        if (steps := numbers["steps"][name]) is not None:
            moments = {kind: torch.zeros_like(parameter) for kind in MOMENTS}
            step = torch.tensor(steps, dtype=torch.float32, device=parameter.device)
            states[parameter] = {"step": step, **moments}
            targets |= {kind: _local(moment) for kind, moment in moments.items()}
        for piece in layout.pieces.get(engine.mesh.place, {}).get(name, ()):
            inner = zip(piece.start, extent(piece.box), strict=True)
            place = tuple(slice(at, at + n) for at, n in inner)
            for kind, tensor in targets.items():
                files.read(f"{kind}/{name}", piece.box, tensor[place])
    engine.skipped_in_a_row = numbers["skipped_in_a_row"]
    # One step back and one forward, which sets the rates. The count is for torch's warnings only.
    schedule, position = engine.schedule, numbers["schedule"]
    before = {"last_epoch": position - 1, "_step_count": position + 2}
    schedule.load_state_dict({**schedule.state_dict(), **before})
    schedule.step()
    engine.put_optimizer_away()
    return numbers["counters"]


def write_numbers(file: Path, numbers: Mapping[str, Any]) -> None:
    """Writes JSON, and waits until it is on the disk. Makes the folder.

    Raises:
        StorageError: if that fails; names the file.
    """
    with explained(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w", encoding="utf-8") as written:
            json.dump(numbers, written)
            written.flush()
            os.fsync(written.fileno())


def read_numbers(file: Path) -> dict[str, Any]:
    """What `write_numbers` wrote.

    Raises:
        ConfigError: if that is not there.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} could not be read ({type(error).__name__}: {error}). Resume from another step."
        ) from error


def _trained(engine: TrainEngine) -> dict[str, nn.Parameter]:
    parameters = engine.model.inner.named_parameters()
    return {name: parameter for name, parameter in parameters if parameter.requires_grad}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _of_all_ranks(mine: Mapping[str, float | None], group: dist.ProcessGroup | None) -> _Steps:
    """Put together: a rank of a pipeline has the parameters of its stages only."""
    found = [dict(mine)]
    if group is not None:
        found *= dist.get_world_size(group)
        dist.all_gather_object(found, dict(mine), group=group)
    return {name: steps for of_rank in found for name, steps in of_rank.items()}


def _layout_of_state(layout: Layout, steps: _Steps) -> Layout:
    """Moments lie as the parameters do."""
    kinds = {
        name: (WEIGHT,) if count is None else (WEIGHT, *MOMENTS) for name, count in steps.items()
    }
    pieces = {
        rank: {
            f"{kind}/{name}": tuple(
                piece._replace(tensor=f"{kind}/{piece.tensor}") for piece in held[name]
            )
            for name in held
            for kind in kinds.get(name, ())
        }
        for rank, held in layout.pieces.items()
    }
    shapes = {f"{kind}/{name}": layout.shapes[name] for name in kinds for kind in kinds[name]}
    return Layout(shapes, pieces)


def _check_parameters(folder: Path, files: TensorFiles, layout: Layout, trained: set[str]) -> None:
    cure = "Resume with the model and the adapters (actor.lora) of that run."
    stored = {
        name.removeprefix(f"{WEIGHT}/"): shape
        for name, shape in files.shapes.items()
        if name.startswith(f"{WEIGHT}/")
    }
    if other := sorted(trained ^ stored.keys()):
        has, has_not = ("model", "checkpoint") if other[0] in trained else ("checkpoint", "model")
        raise ConfigError(
            f"{folder} is the state of another model: the {has} trains `{other[0]}`, and the "
            f"{has_not} has no such parameter ({len(other)} differ). {cure}"
        )
    for name in sorted(trained):
        if tuple(stored[name]) != tuple(layout.shapes[name]):
            raise ConfigError(
                f"{folder} is the state of another model: its `{name}` has the shape "
                f"{list(stored[name])}, and the model's is {list(layout.shapes[name])}. {cure}"
            )
