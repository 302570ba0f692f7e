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
WRONG = {
    "outputs are not added up": (2, {"tp": 2}, "split_tokens", True),
    "nor are they, only to score": (2, {"tp": 2}, "split_tokens", False),
    "gradients are not added up": (2, {"tp": 2}, "gather_tokens", True),
    "outputs of whole rows": (4, {"tp": 2, "pp": 2}, "reduce_from_region", True),
    "gradients of whole rows": (4, {"tp": 2, "pp": 2}, "copy_to_region", True),
    "no number": (2, {"tp": 2}, "nan", True),
    "only in bfloat16": (2, {"tp": 2}, "in bfloat16", True),
}
"""Sums over ranks that are forgotten, in the forward or in the backward pass, or only in bfloat16,
or give no number: ranks, cut, what is broken, and whether the model learns."""


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
    for wrong, (ranks, parallel, broken, trains) in WRONG.items():
        config = ActorConfig(parallel=ParallelConfig(**parallel))
        mesh = ParallelMesh(build_training_mesh(ranks, config.parallel, 1), CPU)
        if rank in mesh.mesh.grid:
            found[wrong] = said_of_broken(mesh, config, broken, trains)
    return found


def compiles_nothing(model, wanted, *_):
    assert wanted == "false", "it would take longer than the trial"
    return False


def said_of_broken(mesh, config, broken, trains):
    cut_proof._proven.clear()
    name = "split_tokens" if broken in ("nan", "in bfloat16") else broken
    right = getattr(tensor, name)

    def wrong(x, group, **how):
        if broken == "nan":
            return right(x, group, **how) * float("nan")
        if broken == "in bfloat16" and x.dtype is not torch.bfloat16:
            return right(x, group, **how)
        return right(x, group, summed=False) if how else x

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as caught:
        patch.setattr(tensor, name, wrong)
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


@pytest.mark.parametrize("wrong", WRONG)
def test_a_cut_that_leaves_something_out_is_a_sentence_on_every_rank(ranks, wrong):
    said = [rank[wrong] for rank in ranks if wrong in rank]
    assert len(said) == WRONG[wrong][0]
    assert all(" (qwen2) cannot be cut by actor.parallel.tp=2" in one for one in said)
    assert all(("in bfloat16, " in one) is (wrong == "only in bfloat16") for one in said)
