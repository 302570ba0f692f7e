"""The files of a training state: which tensors they hold, and under which names.

    model.safetensors     weights: a folder that transformers opens (with adapters, one that peft
                          opens, and `adapter_model.safetensors`)
    moments.safetensors   `exp_avg/<parameter>` and `exp_avg_sq/<parameter>` of what is trained
    training.json         what is a plain number
    rank-00000.json ...   what each rank wrote, and its checksums; see
                          `hybridrl.checkpoint.tensors.rank_manifest`

Tensors that are trained are float32, those that are carried over from the model's own files as
they are there (`carried` in the plain numbers names them); moments that are kept in half precision
lose nothing by it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from hybridrl.checkpoint.tensors.tensor_reader import TensorInFiles
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.models.stored_tensors import StorageFormat, plain_storage_format
from hybridrl.parallel.process_group import to_local

NUMBERS_FILE = "training.json"
MOMENTS_STEM = "moments"
WEIGHTS_STEM = "weights"
"""Of weights under the names of parameters, where transformers keeps tensors of another kind."""
MOMENT_NAMES = ("exp_avg", "exp_avg_sq")
"""As AdamW calls them."""


class EngineStateFiles(NamedTuple):
    """The tensors of an engine that a training state holds.

    Attributes:
        weights: How they stand in files: with adapters these alone.
        trained: Parameters that have moments, on any rank.
    """

    weights: StorageFormat
    trained: tuple[str, ...]


def plan_state_files(engine: TrainEngine) -> EngineStateFiles:
    """Return the tensors of an engine to save. Collective."""
    shapes = engine.layout().shapes
    form = engine.stored_form() or plain_storage_format(WEIGHTS_STEM, shapes)
    mine, group = set(list_trained_parameters(engine)), engine.mesh.group()
    found = [mine]
    if group is not None:  # a rank of a pipeline has the parameters of its stages only
        found *= dist.get_world_size(group)
        dist.all_gather_object(found, mine, group=group)
    everybody = set().union(*found)
    return EngineStateFiles(form, tuple(name for name in shapes if name in everybody))


def list_trained_parameters(engine: TrainEngine) -> dict[str, nn.Parameter]:
    """Return the trained parameters of this rank by name."""
    parameters = engine.model.inner.named_parameters()
    return {name: parameter for name, parameter in parameters if parameter.requires_grad}


def read_local_state(
    engine: TrainEngine, weights: StorageFormat
) -> dict[str, Tensor | TensorInFiles | None]:
    """Return this rank's tensors: weights by parameter name, or by parts of a parameter where the
    files have parts (`StoredForm.layout`), and moments. A parameter has no moments before its first
    optimizer step, and if it never had a gradient."""
    parameters = engine.local_parameters()
    found: dict[str, Tensor | TensorInFiles | None] = {**parameters, **weights.carried_tensors()}
    for name in {part.parameter for part in weights.parts if part.lacking}:
        found |= {f"{name}/{index}": part for index, part in enumerate(parameters[name])}
    for name, parameter in list_trained_parameters(engine).items():
        state = engine.optimizer.state.get(parameter) or {}
        for kind in MOMENT_NAMES:
            found[f"{kind}/{name}"] = to_local(state[kind]) if state else None
    return found
