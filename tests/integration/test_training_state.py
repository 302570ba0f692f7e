"""Real gloo: what training goes on from is the same, whatever way the model was and is cut."""

import itertools
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from engine_cases import CLIPPED, CPU, TEMPERATURE, deal, make_batch
from parallel_cases import assemble, assert_close, parts
from parallel_cases import make_model as plain_model
from ranks import run_ranks
from test_model_folders import critic
from tiers import chosen_of, few_of
from transformers import AutoModelForCausalLM

from hybridrl.algorithms import TokenLoss
from hybridrl.checkpoint.engine_state.state_saver import EngineStateSaver
from hybridrl.checkpoint.engine_state.training_state import load_training_state, save_training_state
from hybridrl.config.schema import ActorConfig, LoraAdapterConfig, OptimizerConfig, ParallelConfig
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.errors import ConfigError
from hybridrl.layout.boxes import box_numel
from hybridrl.layout.training_mesh import build_training_mesh
from hybridrl.models.lora import add_adapters
from hybridrl.models.packed_models import CausalPolicy, ScalarModel
from hybridrl.parallel.process_group import ParallelMesh

WORLD = 4
CUTS = {
    "one rank": (1, ParallelConfig()),
    "dp2": (2, ParallelConfig()),
    "dp3": (3, ParallelConfig()),
    "tp2": (2, ParallelConfig(tp=2)),
    "pp2": (2, ParallelConfig(pp=2)),
    "dp2 x tp2": (4, ParallelConfig(tp=2)),
    "dp4 in two copies": (4, ParallelConfig(shards=2)),
}
ONLY_DP = ("one rank", "dp2", "dp4 in two copies")
MODELS = {
    "critic": ONLY_DP,
    "adapters": ONLY_DP,
    "adapters of a critic": ONLY_DP,
    "experts": ("one rank", "tp2", "dp2 x tp2", "dp4 in two copies"),
}
"""Models of other kinds, and how they are cut."""
LEARNING = OptimizerConfig(learning_rate=0.01, warmup_steps=2, schedule="cosine")
COUNTERS = {"policy_version": 3}


def make_engine(mesh, kind=""):
    inner = (
        critic() if "critic" in kind else plain_model("qwen3_moe" if kind == "experts" else "qwen2")
    )
    if "adapters" in kind:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            add_adapters(inner, LoraAdapterConfig(rank=4))
    config = ActorConfig(tokens_per_microbatch=60)
    model = ScalarModel(inner, "before") if "critic" in kind else CausalPolicy(inner)
    engine = TrainEngine(model, mesh, "float32", config)
    engine.start_optimizer(LEARNING, updates=6)
    return engine


def mine(mesh):
    """This rank's rows."""
    batch, dp = make_batch(), mesh.mesh.axes["dp"]
    counts = {1: [len(batch)], 2: [7, 4], 3: [4, 4, 3], 4: [3, 3, 3, 2]}[dp]
    return batch.take(deal(batch, counts)[mesh.index("dp")])


def learn(engine, updates):
    batch = mine(engine.mesh)
    if isinstance(engine.model, ScalarModel):
        return [engine.update(batch, to_one) for _ in range(updates)]
    return [engine.update(batch, CLIPPED, temperature=TEMPERATURE) for _ in range(updates)]


def to_one(outputs, columns, segments):
    return TokenLoss((outputs["values"] - 1).square(), {})


def state(engine):
    """What this rank holds, in the form of `parts`: weights and moments of each parameter."""
    states = engine.optimizer.state
    found = {f"weight/{name}": part for name, part in parts(engine).items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        held = parts(engine, lambda p, kind=kind: states[p][kind] if states.get(p) else p[:0])
        found |= {f"{kind}/{name}": part for name, part in held.items() if is_whole(part)}
    return found


def is_whole(part):
    _, pieces, local = part
    return local.numel() == sum(box_numel(piece.box) for piece in pieces)


PAIRS = list(itertools.product(CUTS, CUTS))
# Each with itself, what one rank wrote, and what one rank reads.
MAIN = [(cut, other) for cut, other in PAIRS if cut == other or "one rank" in (cut, other)]


def program(rank, folder, pairs, models):
    """What each cut writes after two updates, and what others make of it."""
    meshes = {
        name: ParallelMesh(build_training_mesh(ranks, parallel, 1), CPU, parallel.shards)
        for name, (ranks, parallel) in CUTS.items()
    }
    found = {}
    for cut, mesh in meshes.items():
        if rank not in mesh.mesh.grid:
            continue
        engine = make_engine(mesh)
        save_training_state(engine, folder / f"{cut}, before")
        learn(engine, 2)
        saver = EngineStateSaver(engine)
        saver.start(folder / cut, COUNTERS, {})
        found[cut, "written"] = state(engine)
        found[cut, "next"] = learn(engine, 1), state(engine)  # while it is written
        found[cut, "bytes"] = saver.finish(wait=True).bytes
    dist.barrier()
    for cut, other in pairs:
        if rank not in meshes[other].mesh.grid:
            continue
        engine = make_engine(meshes[other])
        learn(engine, 1)  # to be forgotten
        counters = load_training_state(engine, folder / cut)
        read = state(engine)
        found[cut, other] = counters, read, learn(engine, 1), state(engine)
    for cut, mesh in meshes.items():
        if rank in mesh.mesh.grid:
            engine = make_engine(mesh)
            learn(engine, 1)
            load_training_state(engine, folder / f"{cut}, before")
            found[cut, "afresh"] = bool(engine.optimizer.state), learn(engine, 2), state(engine)
    if find_spec("peft"):
        found |= others(rank, meshes, folder, models)
    return found


def others(rank, meshes, folder, models):
    """The same of models of other kinds."""
    found = {}
    written = [(model, cut) for model, cuts in MODELS.items() if model in models for cut in cuts]
    for model, cut in written:
        mesh = meshes[cut]
        if rank in mesh.mesh.grid:
            engine = make_engine(mesh, model)
            learn(engine, 2)
            save_training_state(engine, folder / model / cut)
            found[model, cut, "written"] = state_of_trained(engine)
    dist.barrier()
    for model, cut, other in [(*one, other) for one in written for other in MODELS[one[0]]]:
        if rank in meshes[other].mesh.grid:
            engine = make_engine(meshes[other], model)
            load_training_state(engine, folder / model / cut)
            found[model, cut, other] = state_of_trained(engine)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory, folder):
    pairs = chosen_of(request, "cut", "other")
    models = {"experts", *(model for (model,) in chosen_of(request, "model"))}
    return run_ranks(program, tmp_path_factory.mktemp("ranks"), WORLD, folder, pairs, models)


def of(ranks, *key):
    return [rank[key] for rank in ranks if key in rank]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("cut", "other"), few_of(PAIRS, MAIN, several=True))
def test_any_cut_reads_what_any_other_wrote(ranks, cut, other):
    written = assemble(of(ranks, cut, "written"))
    found = of(ranks, cut, other)
    assert len(found) == CUTS[other][0] and all(rank[0] == COUNTERS for rank in found)
    assert_equal(assemble([rank[1] for rank in found]), written)
    assert any(name.startswith("exp_avg_sq/") for name in written)
    goes_on = of(ranks, cut, "next")
    after = assemble([rank[3] for rank in found])
    expected = assemble([rank[1] for rank in goes_on])
    if cut == other:
        assert_equal(after, expected)
        assert [rank[2] for rank in found] == [rank[0] for rank in goes_on]
    weights = {name: t for name, t in expected.items() if name.startswith("weight/")}
    assert_close({name: after[name] for name in weights}, weights, 1e-5)
    rates = [metrics["learning_rate"] for metrics in found[0][2]]
    assert rates == [metrics["learning_rate"] for metrics in goes_on[0][0]]


@pytest.mark.parametrize("cut", CUTS)
def test_before_the_first_update_there_are_no_moments(ranks, cut):
    found = of(ranks, cut, "afresh")
    assert not any(rank[0] for rank in found)
    assert_equal(assemble([rank[2] for rank in found]), assemble(of(ranks, cut, "written")))


def test_ranks_write_about_as_much_and_together_everything_once(ranks):
    for cut in CUTS:
        sizes = of(ranks, cut, "bytes")
        whole = assemble(of(ranks, cut, "written"))
        assert sum(sizes) == sum(tensor.nbytes for tensor in whole.values())
        # The largest tensor of this tiny model is a good part of it.
        assert max(sizes) <= 1.5 * sum(sizes) / len(sizes)


@pytest.mark.skipif(not find_spec("peft"), reason="adapters need peft")
@pytest.mark.parametrize("model", few_of(MODELS, ["adapters of a critic"]))
def test_other_models_are_read_in_any_cut(ranks, model):
    wanted = assemble(of(ranks, model, "one rank", "written"))
    has_adapters = [".lora_" in name for name in wanted if "score" not in name]
    assert has_adapters and all(has_adapters) == ("adapters" in model)
    assert ("critic" in model) == any("score" in name for name in wanted)
    for cut, other in itertools.product(MODELS[model], MODELS[model]):
        written = assemble(of(ranks, model, cut, "written"))
        assert_equal(assemble(of(ranks, model, cut, other)), written)


@pytest.mark.skipif(not find_spec("peft"), reason="see above")
@pytest.mark.parametrize("cut", MODELS["experts"])
def test_a_state_of_experts_is_a_folder_that_transformers_opens(ranks, folder, cut):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder / "experts" / cut, output_loading_info=True
    )
    assert not report["missing_keys"]
    written = assemble(of(ranks, "experts", cut, "written"))
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, written[f"weight/{name}"])


def test_of_adapters_only_they_are_kept_and_no_other_model_takes_them(mesh, tmp_path):
    peft = pytest.importorskip("peft")
    engine = make_engine(mesh, "adapters")
    learn(engine, 2)
    save_training_state(engine, tmp_path)
    with pytest.raises(ConfigError, match=r"another model: the model trains `.*actor\.lora"):
        load_training_state(make_engine(mesh), tmp_path)
    opened = peft.PeftModel.from_pretrained(plain_model(), str(tmp_path))
    merged = dict(opened.merge_and_unload().named_parameters())
    for name, tensor in engine.full_weights():
        torch.testing.assert_close(merged[name], tensor)


def state_of_trained(engine):
    trained = {n for n, p in engine.model.inner.named_parameters() if p.requires_grad}
    found = state(engine)
    return {name: part for name, part in found.items() if name.partition("/")[2] in trained}
