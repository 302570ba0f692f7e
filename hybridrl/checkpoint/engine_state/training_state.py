"""Saving and loading the training state of a TrainEngine, on any number of ranks and with any
sharding. See `plan_state_files` for its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from hybridrl.checkpoint.engine_state.state_files import (
    MOMENTS_STEM,
    NUMBERS_FILE,
    OPTIMIZER,
    EngineStateFiles,
    list_trained_parameters,
    plan_state_files,
)
from hybridrl.checkpoint.engine_state.state_saver import EngineStateSaver
from hybridrl.checkpoint.tensors.rank_manifest import find_missing_data, load_manifests
from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.engine.model_folder import read_parameter_pieces
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.errors import ConfigError
from hybridrl.layout.box_table import slice_at
from hybridrl.layout.boxes import box_shape
from hybridrl.models.stored_tensors import find_stored_tensors
from hybridrl.parallel.process_group import to_local
from hybridrl.system.locations import Location

_OPTIMIZER_CURE = (
    "Resume with the optimizer of that run, by actor.optimizer.name or "
    "models.<role>.optimizer.name."
)


def save_training_state(
    engine: TrainEngine, folder: Location, counters: Mapping[str, int] | None = None
) -> None:
    """Write weights, moments and numbers; see `EngineStateSaver.save`. The folder must hold no
    state yet, and all ranks must see it. Collective; done when all ranks have returned.

    Args:
        counters: The caller's own, for `load_training_state` to give back.

    Raises:
        StorageError: if a file cannot be written; names it.
    """
    EngineStateSaver(engine).save(folder, counters or {}, {})


@torch.no_grad()
def load_training_state(engine: TrainEngine, folder: Location) -> dict[str, int]:
    """Resume an engine from a saved state: its weights, its moments and its position in the
    schedule. Learning rates are those of this engine's own settings at that position. Collective.

    Returns:
        The `counters` that were saved.

    Raises:
        ConfigError: if a file is damaged, or the state is that of another model; names the folder
            and the parameter.
    """
    numbers, lists = read_state_numbers(folder / NUMBERS_FILE), load_manifests(folder)
    if fault := find_missing_data(folder, lists):
        raise ConfigError(f"{fault}: saving did not come to its end. Resume from another step.")
    steps = {name: count for written in lists for name, count in written.steps.items()}
    files, layout = plan_state_files(engine), engine.layout()
    stems = files.weights.stem, MOMENTS_STEM
    weights, moments = (TensorReader(folder, stem, lists) for stem in stems)
    _check_optimizer(folder, numbers.get(OPTIMIZER, "adamw"), engine.optimizer_config.name)
    _check_parameters(folder, moments, files)
    parts = files.weights.by_parameter()
    if not weights.shapes.keys() >= {part.name for each in parts.values() for part in each}:
        # Of an older version, or the model's folder has changed since: names may be others.
        found = find_stored_tensors(engine.model.inner, layout.shapes, weights.shapes)
        parts |= {name: list(tensors) for name, tensors in found.items()}
    local, states = engine.local_parameters(), engine.optimizer.state
    place = engine.mesh.place
    held, kept = layout.pieces.get(place, {}), files.moments.pieces.get(place, {})
    for name, parameter in list_trained_parameters(engine).items():
        read_parameter_pieces(weights, parts[name], held.get(name, ()), local[name])
        states.pop(parameter, None)
        if (count := steps.get(name)) is None:
            continue
        form = files.trained[name]
        state = states[parameter] = form.make_step(count, parameter.device)
        state |= {kind: torch.empty_like(parameter) for kind in form.moments}
        for kind in form.statistics:
            shape = files.moments.shapes[f"{kind}/{name}"]
            state[kind] = torch.empty(shape, device=parameter.device)
        for kind in form.tensors:
            stored, tensor = f"{kind}/{name}", to_local(state[kind])
            for piece in kept.get(stored, ()):
                moments.read(stored, piece.box, slice_at(tensor, piece.start, box_shape(piece.box)))
    engine.gather_anew()
    engine.skipped_in_a_row = numbers["skipped_in_a_row"]
    engine.set_schedule_position(numbers["schedule"])
    engine.put_optimizer_away()
    counters: dict[str, int] = numbers["counters"]
    return counters


def read_state_numbers(file: Location) -> dict[str, Any]:
    """Read a JSON file of plain numbers that belongs to a state.

    Raises:
        ConfigError: if it cannot be read; names it.
    """
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} could not be read ({type(error).__name__}: {error}). Resume from another step."
        ) from error


def _check_parameters(
    folder: Location,
    moments: TensorReader,
    files: EngineStateFiles,
) -> None:
    cure = "Resume with the model and the adapters (actor.lora) of that run."
    trained = {name for name, form in files.trained.items() if form.tensors}
    stored = {name.split("/", 1)[1] for name in moments.shapes}
    if other := sorted(trained ^ stored):
        has, has_not = ("model", "checkpoint") if other[0] in trained else ("checkpoint", "model")
        raise ConfigError(
            f"{folder} is the state of another model: the {has} trains `{other[0]}`, and the "
            f"{has_not} has no such parameter ({len(other)} differ). {cure}"
        )
    if other := sorted(files.moments.shapes.keys() ^ moments.shapes.keys()):
        raise ConfigError(
            f"{folder} is the state of another optimizer: {len(other)} tensors that one keeps and "
            f"the other does not, such as `{other[0]}`. {_OPTIMIZER_CURE}"
        )
    for name, shape in files.moments.shapes.items():
        if tuple(moments.shapes[name]) != tuple(shape):
            raise ConfigError(
                f"{folder} is the state of another model: its `{name.split('/', 1)[1]}` has the "
                f"shape {list(moments.shapes[name])}, and the model's is {list(shape)}. {cure}"
            )


def _check_optimizer(folder: Location, before: str, now: str) -> None:
    # Of a class in a file its name: the file may have moved.
    if before.rpartition(":")[2] != now.rpartition(":")[2]:
        raise ConfigError(
            f"{folder} is the state of a job with actor.optimizer.name={before}, and this one has "
            f"{now}. {_OPTIMIZER_CURE}"
        )
