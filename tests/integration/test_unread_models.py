"""Real gloo: a model of which every rank reads its part is the one that is loaded whole and cut."""

import pytest
import torch
from engine_cases import CLIPPED, CPU, make_batch
from parallel_cases import make_model, parts
from ranks import run_ranks
from safetensors.torch import save_file
from test_model_folders import critic, experts

from hybridrl.checkpoint.tensors import tensor_reader as reading
from hybridrl.config.schema import ActorConfig, LoraAdapterConfig, OptimizerConfig, ParallelConfig
from hybridrl.controller.worker import WorkerContext
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.layout.training_mesh import build_training_mesh
from hybridrl.models.lora import add_adapters
from hybridrl.models.model_loading import load_model
from hybridrl.models.packed_models import CausalPolicy, ScalarModel
from hybridrl.parallel import fsdp
from hybridrl.parallel.process_group import ParallelMesh
from hybridrl.workers.training_engines import ModelSource, build_policy_engine, build_scalar_engine

pytestmark = pytest.mark.more

WORLD = 4
CUTS = {
    "dp4": ParallelConfig(),
    "dp4 in two copies": ParallelConfig(shards=2),
    "tp4": ParallelConfig(tp=4),
    "dp2 x pp2": ParallelConfig(pp=2),
    "tp2 x pp2": ParallelConfig(tp=2, pp=2),
}
LORA = LoraAdapterConfig(rank=4)
# Folder, whether it is to have a scalar head, adapters.
MODELS = {
    "tied": ("tied", False, LoraAdapterConfig()),
    "untied, 1 key-value head": ("untied", False, LoraAdapterConfig()),
    "a critic from a language model": ("tied", True, LoraAdapterConfig()),
    "a critic from a critic": ("critic", True, LoraAdapterConfig()),
    "adapters": ("tied", False, LORA),
    "a critic's adapters": ("tied", True, LORA),
    "a trained critic's adapters": ("critic", True, LORA),
    "experts": ("experts", False, LoraAdapterConfig()),
    "experts, those of a layer in one tensor": ("fused", False, LoraAdapterConfig()),
}


CRITICS = ("a critic from a language model", "a critic from a critic")
EVERYWHERE = ("tied", "untied, 1 key-value head", "experts")


def cases():
    """(cut, model, whether it is one FSDP unit)."""
    found = [(cut, model, True) for cut in CUTS for model in EVERYWHERE]
    found += [("dp4", model, True) for model in MODELS if model not in EVERYWHERE]
    found += [("tp2 x pp2", model, True) for model in CRITICS]
    found += [("tp4", "adapters", True)]
    return [*found, ("dp4", "tied", False), ("dp2 x pp2", "tied", False)]


def write(folder):
    made = {
        "tied": make_model(),
        "untied": make_model("qwen3", 1, False),
        "critic": critic(),
        "experts": experts(),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name, max_shard_size=4000)
    fused = experts()
    fused.config.save_pretrained(folder / "fused")
    fused.generation_config.save_pretrained(folder / "fused")
    save_file(fused.state_dict(), folder / "fused" / "model.safetensors")


def whole(mesh, source, config, scalar):
    """As engines were built before they could read parts."""
    model = load_model(source.path, "float32", scalar=scalar, needs_head=not scalar)
    if config.lora.rank:
        add_adapters(model, config.lora)
    model = ScalarModel(model, "before") if scalar else CausalPolicy(model)
    return TrainEngine(model, mesh, "float32", config)


def contents(engine):
    inner = engine.model.inner
    return {
        "parameters": {
            name: (box, local, engine.model.inner.get_parameter(name).requires_grad)
            for name, (_, box, local) in parts(engine).items()
        },
        "buffers": dict(inner.named_buffers()),
        "objects": len({id(p) for p in inner.parameters()}),
        "trains": inner.training,
        "config": inner.config.to_dict(),
        "generates": inner.can_generate() and inner.generation_config.to_dict(),
    }


def program(rank, folder):
    found, count, true = {}, [0], reading.os.preadv

    def counted(*args):
        got = true(*args)
        count[0] += got
        return got

    reading.os.preadv = counted
    meshes = {
        cut: ParallelMesh(build_training_mesh(WORLD, parallel), CPU, parallel.shards)
        for cut, parallel in CUTS.items()
    }
    for cut, model, small in cases():
        fsdp.SMALL_MODEL_BYTES = 1 << 20 if small else 0
        place, scalar, lora = MODELS[model]
        config = ActorConfig(parallel=CUTS[cut], lora=lora)
        source = ModelSource(str(folder / place), "", "float32", 64, ())
        torch.manual_seed(3)
        reference = whole(meshes[cut], source, config, scalar)
        wanted = contents(reference)
        torch.manual_seed(3)
        count[0] = 0
        context = WorkerContext("actor", rank, WORLD)
        if scalar:
            engine = build_scalar_engine(context, source, config, "before")
        else:
            engine = build_policy_engine(context, source, config)
        read = count[0]
        mine = contents(engine)
        held = sum(local.nbytes for _, local, _ in mine["parameters"].values())
        wrong = differences(mine, wanted)
        if model in ("tied", "adapters"):
            learned = [contents(learn(one)) for one in (engine, reference)]
            wrong += differences(*learned)
        found[cut, model, small] = {"wrong": wrong, "read": read, "held": held}
    return found


def learn(engine):
    """The engine after an update."""
    engine.start_optimizer(OptimizerConfig(learning_rate=0.01), 10)
    engine.update(make_batch(), CLIPPED)
    return engine


def differences(mine, wanted):
    """Names of what is not the same in two engines."""
    wrong = [key for key in ("objects", "trains", "generates") if mine[key] != wanted[key]]
    wrong += [key for key, value in wanted["config"].items() if mine["config"].get(key) != value]
    if list(mine["parameters"]) != list(wanted["parameters"]):
        return [*wrong, "names"]
    for name, (box, local, learns) in wanted["parameters"].items():
        found = mine["parameters"][name]
        if found[0] != box or found[2] != learns or not torch.equal(found[1], local):
            wrong.append(name)
    buffers = mine["buffers"]
    wrong += [n for n, b in wanted["buffers"].items() if not torch.equal(buffers.get(n), b)]
    return wrong


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write(folder)
    return run_ranks(program, tmp_path_factory.mktemp("ranks"), WORLD, folder)


@pytest.mark.parametrize(("cut", "model", "small"), cases())
def test_it_is_the_model_that_is_loaded_whole(ranks, cut, model, small):
    for rank in ranks:
        found = rank[cut, model, small]
        assert not found["wrong"]
        if model in EVERYWHERE or "one tensor" in model:
            assert found["read"] == found["held"], "no byte more than it holds"
        else:
            assert 0 < found["read"] <= found["held"] + 200
