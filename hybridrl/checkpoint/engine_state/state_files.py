"""The files of a training state: which tensors they hold, and under which names.

    model.safetensors     weights: a folder that transformers opens (with adapters, one that peft
                          opens, and `adapter_model.safetensors`)
    moments.safetensors   what the optimizer remembers of what is trained: `exp_avg/<parameter>` and
                          `exp_avg_sq/<parameter>` of AdamW, others as in `StateForm`
    training.json         what is a plain number
    rank-00000.json ...   what each rank wrote, and its checksums; see
                          `hybridrl.checkpoint.tensors.rank_manifest`

Tensors that are trained are float32, those that are carried over from the model's own files as
they are there (`carried` in the plain numbers names them); moments that are kept in half precision
lose nothing by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from hybridrl.checkpoint.tensors.tensor_reader import TensorInFiles
from hybridrl.engine.moment_storage import read_moment
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.layout.boxes import Part, Piece, full_box
from hybridrl.layout.tensor_layout import TensorLayout
from hybridrl.models.optimizer_states import StateForm, find_state_form, statistic_shape
from hybridrl.models.stored_tensors import StorageFormat, plain_storage_format
from hybridrl.parallel.collectives import all_gather_distinct

NUMBERS_FILE = "training.json"
OPTIMIZER = "optimizer"
"""In the plain numbers of a state: the name of its optimizer. Those of older versions are AdamW's
and do not name it."""
MOMENTS_STEM = "moments"
WEIGHTS_STEM = "weights"
"""Of weights under the names of parameters, where transformers keeps tensors of another kind."""


class EngineStateFiles(NamedTuple):
    """The tensors of an engine that a training state holds.

    Attributes:
        weights: How they stand in files: with adapters these alone.
        trained: Parameters that are trained, on any rank, and what the optimizer remembers of each.
        moments: The layout of what it remembers, as `<kind>/<parameter>`, in the order of files.
    """

    weights: StorageFormat
    trained: Mapping[str, StateForm]
    moments: TensorLayout


def plan_state_files(engine: TrainEngine) -> EngineStateFiles:
    """Return the tensors of an engine to save. Collective."""
    layout = engine.layout()
    form = engine.stored_form() or plain_storage_format(WEIGHTS_STEM, layout.shapes)
    mine, group = find_state_forms(engine), engine.mesh.group()
    found = [mine] if group is None else all_gather_distinct(mine, group)
    everybody = {name: kept for one in found for name, kept in one.items()}
    trained = {name: everybody[name] for name in layout.shapes if name in everybody}
    return EngineStateFiles(form, trained, _lay_out_moments(layout, trained))


def find_state_forms(engine: TrainEngine) -> dict[str, StateForm]:
    """Return what the optimizer remembers of each trained parameter of this rank, by name."""
    known: dict[tuple[int, bool], StateForm] = {}
    found = {}
    for name, parameter in list_trained_parameters(engine).items():
        key = (parameter.ndim, name in engine.hidden_matrices)
        if key not in known:
            known[key] = find_state_form(engine.optimizer_config, *key)
        found[name] = known[key]
    return found


def _lay_out_moments(layout: TensorLayout, trained: Mapping[str, StateForm]) -> TensorLayout:
    """Return the layout of what the optimizer remembers of parameters of this layout: tensors of
    their shape are held as they are, and others whole wherever a part of the parameter is. Local
    tensors are called `<parameter>/<kind>`."""
    parts = {}
    for kind in dict.fromkeys(kind for form in trained.values() for kind in form.tensors):
        for name in (name for name, form in trained.items() if kind in form.tensors):
            shape, said = layout.shapes[name], partial(_name_moment, kind)
            key: tuple[object, ...] = (kind,)
            if kind in trained[name].statistics:
                shape = statistic_shape(kind, shape)
                said, key = partial(_hold_whole, kind, shape), (kind, shape)
            parts[f"{kind}/{name}"] = Part(name, shape, key, said)
    return layout.parts(parts)


def _name_moment(kind: str, piece: Piece) -> Piece:
    return piece._replace(tensor=f"{piece.tensor}/{kind}")


def _hold_whole(kind: str, shape: tuple[int, ...], piece: Piece) -> Piece:
    return Piece(full_box(shape), f"{piece.tensor}/{kind}", (0,) * len(shape))


def list_trained_parameters(engine: TrainEngine) -> dict[str, nn.Parameter]:
    """Return the trained parameters of this rank by name."""
    parameters = engine.model.inner.named_parameters()
    return {name: parameter for name, parameter in parameters if parameter.requires_grad}


def read_local_state(
    engine: TrainEngine, weights: StorageFormat
) -> dict[str, Tensor | TensorInFiles | None]:
    """Return this rank's tensors: weights by parameter name, or by parts of a parameter where the
    files have parts (`StorageFormat.layout`), and moments. A parameter has no moments before its
    first optimizer step, and if it never had a gradient."""
    parameters = engine.local_parameters()
    found: dict[str, Tensor | TensorInFiles | None] = {**parameters, **weights.carried_tensors()}
    for name in {part.parameter for part in weights.parts if part.lacking}:
        found |= {f"{name}/{index}": part for index, part in enumerate(parameters[name])}
    forms = find_state_forms(engine)
    for name, parameter in list_trained_parameters(engine).items():
        state = engine.optimizer.state.get(parameter) or {}
        for kind in forms[name].tensors:
            found[f"{name}/{kind}"] = read_moment(state[kind]) if state else None
    return found
