"""Real gloo: whatever way a model is cut, its folder is that of one process, bit for bit, and any
other cut loads it."""

import pytest
import torch
import torch.distributed as dist
from engine_cases import CPU
from parallel_cases import make_model, parts
from ranks import run_ranks
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen2Config,
    Qwen3MoeConfig,
)

from hybridrl.checkpoint.tensors import tensor_writer as writing
from hybridrl.config.schema import ActorConfig, LoraAdapterConfig, ParallelConfig
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.errors import HybridRLError
from hybridrl.layout.training_mesh import build_training_mesh
from hybridrl.models.lora import add_adapters
from hybridrl.models.model_loading import read_stored_dtype
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import CausalPolicy, ScalarModel
from hybridrl.parallel.process_group import ParallelMesh

pytestmark = pytest.mark.more

WORLD = 4
ONE = "one rank"
CUTS = {
    ONE: (1, ParallelConfig()),
    "dp2": (2, ParallelConfig()),
    "dp3": (3, ParallelConfig()),
    "dp4 in two copies": (4, ParallelConfig(shards=2)),
    "tp2": (2, ParallelConfig(tp=2)),
    "tp4": (4, ParallelConfig(tp=4)),
    "pp2": (2, ParallelConfig(pp=2)),
    "dp2 x tp2": (4, ParallelConfig(tp=2)),
    "tp2 x pp2": (4, ParallelConfig(tp=2, pp=2)),
}


# Whose folders each cut loads: those of one that has saved the same models.
BEFORE = dict(zip(CUTS, ["dp4 in two copies", ONE, "dp2", "dp3", *list(CUTS)[3:-1]], strict=True))


def critic():
    config = Qwen2Config(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=1,
    )
    return seeded(AutoModelForSequenceClassification, config)


def experts():
    """transformers keeps the experts of a layer in one tensor, and saves each alone."""
    config = Qwen3MoeConfig(
        vocab_size=23,
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=4,
    )
    return seeded(AutoModelForCausalLM, config)


HALF = "a model in bfloat16"


def adapted():
    model = make_model()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        add_adapters(model, LoraAdapterConfig(rank=4))
    return model


def seeded(kind, config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind.from_config(config, attn_implementation=PACKED_ATTENTION)


MODELS = {
    "qwen2, tied": make_model,
    "qwen3, untied, 1 key-value head": lambda: make_model("qwen3", 1, False),
    "critic": critic,
    "experts": experts,
    "adapters": adapted,
}
ONLY_DP = ("adapters",)


def pairs():
    """What is saved, and how it is cut."""
    return [
        (cut, model)
        for cut, (_, parallel) in CUTS.items()
        for model in MODELS
        if model not in ONLY_DP or parallel.tp * parallel.pp == 1
    ]


def program(rank, folder):
    """Saves every model under every cut, then loads under each what another one saved."""
    meshes = {
        name: ParallelMesh(build_training_mesh(ranks, parallel), CPU, parallel.shards)
        for name, (ranks, parallel) in CUTS.items()
    }
    engines, found = {}, {}
    for cut, model in pairs():
        if rank in meshes[cut].mesh.grid:
            inner = MODELS[model]()
            wrapped = ScalarModel(inner, "before") if model == "critic" else CausalPolicy(inner)
            parallel = CUTS[cut][1]
            config = ActorConfig(parallel=parallel)
            engines[cut, model] = TrainEngine(wrapped, meshes[cut], "float32", config)
            engines[cut, model].save(folder / cut / model, file_bytes=4000)  # several files
        if model == "qwen2, tied" and rank in meshes[cut].mesh.grid:
            engines[cut, model].save(folder / cut / HALF, torch.bfloat16, 4000)
    dist.barrier()
    for (cut, model), engine in engines.items():
        stored = "qwen2, tied" if model == "adapters" else model
        for saved in (ONE, BEFORE[cut]):
            before = parts(engine)
            with torch.no_grad():
                for parameter in engine.model.parameters():
                    parameter.zero_()
            engine.load(folder / saved / stored)
            after = parts(engine)
            read = [name for name in before if ".lora_" not in name]
            found[cut, model, saved] = all(torch.equal(before[n][2], after[n][2]) for n in read)
    found["failures"] = failures(rank, engines, folder)
    return found


def failures(rank, engines, folder):
    """What each of two ranks says when the second one cannot write, and of half a file."""
    said = []
    engine = engines.get(("dp2", "qwen2, tied"))
    if engine is None:
        return said
    if rank == 1:
        writing.os.pwrite = full
    half = folder / "half"
    for work in (engine.save, engine.load):
        try:
            work(half)
        except HybridRLError as error:
            said.append(f"{type(error).__name__}: {error}")
        if work == engine.save:
            dist.barrier(engine.mesh.group())
            if rank == 0:
                whole = next((folder / "dp2" / "qwen2, tied").glob("*.safetensors"))
                (half / "model.safetensors").write_bytes(whole.read_bytes()[:-10])
            dist.barrier(engine.mesh.group())
    return said


def full(*_):
    raise OSError(28, "No space left on device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, folder):
    return run_ranks(program, tmp_path_factory.mktemp("ranks"), WORLD, folder)


def tensors(folder):
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize(("cut", "model"), pairs())
def test_a_folder_is_that_of_one_process(ranks, folder, cut, model):
    found = tensors(folder / cut / model)
    wanted = tensors(folder / ONE / model)
    assert found.keys() == wanted.keys() and found
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    kept = {path.name for path in (folder / cut / model).iterdir() if path.suffix == ".json"}
    assert kept == {
        path.name for path in (folder / ONE / model).iterdir() if path.suffix == ".json"
    }


@pytest.mark.parametrize("model", MODELS)
def test_transformers_opens_it(ranks, folder, model):
    kind = AutoModelForSequenceClassification if model == "critic" else AutoModelForCausalLM
    if model == "adapters":
        assert set(tensors(folder / ONE / model)), "see test_adapters.py"
        return
    loaded, report = kind.from_pretrained(folder / ONE / model, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    wanted = MODELS[model]().state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in loaded.state_dict().items())
    assert loaded.config.dtype == torch.float32


def test_each_expert_is_a_tensor_of_its_own(ranks, folder):
    names = tensors(folder / "tp2 x pp2" / "experts").keys()
    first = {name for name in names if ".0.mlp.experts.3." in name}
    assert first == {
        f"model.layers.0.mlp.experts.3.{leaf}_proj.weight" for leaf in ("gate", "up", "down")
    }


@pytest.mark.parametrize("cut", [ONE, "dp4 in two copies", "tp2 x pp2"])
def test_a_model_is_saved_in_another_precision(ranks, folder, cut):
    wanted, found = tensors(folder / ONE / "qwen2, tied"), tensors(folder / cut / HALF)
    assert all(torch.equal(found[name], wanted[name].bfloat16()) for name in wanted)
    loaded = AutoModelForCausalLM.from_pretrained(folder / cut / HALF)
    assert (
        loaded.config.dtype == torch.bfloat16
        and read_stored_dtype(folder / cut / HALF) == "bfloat16"
    )


def test_every_cut_loads_what_another_has_saved(ranks):
    found = [(key, same) for rank in ranks for key, same in rank.items() if key != "failures"]
    assert {key[:2] for key, _ in found} == set(pairs())
    assert not [key for key, same in found if not same]


def test_what_fails_on_one_rank_fails_on_all_with_its_sentence(ranks):
    first, second = ranks[0]["failures"], ranks[1]["failures"]
    assert first[0].startswith("StorageError: Rank 1 could not write its part of the model: Cannot")
    assert second[0].startswith("StorageError: Cannot write ")
    for said in (first, second):
        assert "ConfigError" in said[1] and "half/model.safetensors is damaged" in said[1]
