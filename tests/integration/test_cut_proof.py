"""Real gloo: the trial that every cut of a model passes before the model itself is cut."""

import pytest
import torch
from engine_cases import CPU
from ranks import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridrl.config.schema import ActorConfig, ParallelConfig
from hybridrl.engine import parallel_trial as cut_proof
from hybridrl.engine import sharded_model
from hybridrl.errors import ConfigError
from hybridrl.layout.training_mesh import build_training_mesh
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import CausalPolicy, ScalarModel
from hybridrl.parallel import tensor_parallel as tensor
from hybridrl.parallel.process_group import ParallelMesh

pytestmark = pytest.mark.more

CUTS = {
    "tp2": (2, {"tp": 2}),
    "tp3": (3, {"tp": 3}),
    "pp2": (2, {"pp": 2}),
    "pp2, two chunks": (2, {"pp": 2, "chunks": 2}),
    "ring2 x ulysses2": (4, {"ring": 2, "ulysses": 2}),
    "dp2 x tp2": (4, {"tp": 2}),
    "tp2 x pp2": (4, {"tp": 2, "pp": 2}),
}
MODELS = {
    "qwen2, 7 heads a group": ("qwen2", {"num_attention_heads": 28, "num_key_value_heads": 4}),
    "qwen3 of experts": ("qwen3_moe", {}),
    "mistral, windows": ("mistral", {"sliding_window": 4096}),
}
WRONG = [
    ("reduce_from_region", True),
    ("reduce_from_region", False),
    ("copy_to_region", True),
    ("nan", True),
    ("in bfloat16", True),
]
"""Sums over ranks that are forgotten, in the forward or in the backward pass, or only in bfloat16,
or give no number; whether the model learns."""


def made(family, settings, scalar=False):
    """Of full size, but without memory: only its configuration counts."""
    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    config = AutoConfig.for_model(family, **settings, num_labels=1)
    with torch.device("meta"):
        model = kind.from_config(config, attn_implementation=PACKED_ATTENTION)
    return ScalarModel(model, "before") if scalar else CausalPolicy(model)


def program(rank):
    found = {}
    # As on a GPU: there is another kernel for bfloat16, and the job's layers are compiled.
    cut_proof.has_varlen_attention = lambda kind: True
    sharded_model.compile_layers = compiles_nothing
    for cut, (ranks, parallel) in CUTS.items():
        config = ActorConfig(parallel=ParallelConfig(**parallel), compile="true")
        mesh = ParallelMesh(build_training_mesh(ranks, config.parallel, 1), CPU)
        if rank not in mesh.mesh.grid:
            continue
        models = {name: made(*model) for name, model in MODELS.items()}
        models["a critic"] = made("qwen2", {}, scalar=True)
        for name, model in models.items():
            cut_proof._proven.clear()
            try:
                cut_proof.check_parallel_equivalence(
                    model, name, mesh, config, "bfloat16", trains=True
                )
                found[cut, name] = "the same" if cut_proof._proven else "not tried"
            except ConfigError as error:
                found[cut, name] = str(error)
    config = ActorConfig(parallel=ParallelConfig(tp=2))
    mesh = ParallelMesh(build_training_mesh(2, config.parallel, 1), CPU)
    if rank in mesh.mesh.grid:
        for forgotten, trains in WRONG:
            found[forgotten, trains] = broken(mesh, config, forgotten, trains)
    return found


def compiles_nothing(model, wanted, *_):
    assert wanted == "false", "it would take longer than the trial"
    return False


def broken(mesh, config, forgotten, trains):
    cut_proof._proven.clear()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as caught:
        if forgotten == "nan":
            patch.setattr(tensor, "reduce_from_region", lambda x, *_: x * float("nan"))
        elif forgotten == "in bfloat16":
            reduce = tensor.reduce_from_region

            def only_half(x, *arguments):
                return x if x.dtype is torch.bfloat16 else reduce(x, *arguments)

            patch.setattr(tensor, "reduce_from_region", only_half)
        else:
            patch.setattr(tensor, forgotten, lambda x, *_: x)
        cut_proof.check_parallel_equivalence(
            made("qwen2", {}), "mine", mesh, config, "bfloat16", trains=trains
        )
    return str(caught.value)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(program, tmp_path_factory.mktemp("ranks"), 4)


@pytest.mark.parametrize("model", [*MODELS, "a critic"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_model_is_the_same(ranks, cut, model):
    found = {rank[cut, model] for rank in ranks if (cut, model) in rank}
    assert found == {"the same"}


@pytest.mark.parametrize(("forgotten", "trains"), WRONG)
def test_a_cut_that_leaves_something_out_is_a_sentence_on_every_rank(ranks, forgotten, trains):
    begin = "mine (qwen2) cannot be cut by actor.parallel.tp=2: "
    assert all(rank[forgotten, trains].startswith(begin) for rank in ranks[:2])
