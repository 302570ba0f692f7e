"""Real gloo: optimizers that need whole matrices step the same however these are cut, and go on
from what any cut has saved."""

import itertools

import pytest
import torch
import torch.distributed as dist
from engine_cases import CLIPPED, CPU, TEMPERATURE
from parallel_cases import assemble, assert_close, make_model, parts
from ranks import run_ranks
from test_training_state import CUTS, WORLD, mine
from tiers import chosen_of, few_of

from hybridrl.checkpoint.engine_state.training_state import load_training_state, save_training_state
from hybridrl.config.schema import ActorConfig, OptimizerConfig
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.layout.training_mesh import build_training_mesh
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.parallel.process_group import ParallelMesh

OWN = """
import torch

class Lion(torch.optim.Optimizer):
    elementwise = True

    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["mean"], state["step"] = torch.zeros_like(p), 0
                    state["step"] += 1
                    state["mean"].lerp_(p.grad, 1 - group["beta"])
                    rate = group["lr"] / state["step"]
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(torch.tanh(1e4 * state["mean"]), alpha=-rate)
"""
OPTIMIZERS = {
    "muon": {"name": "muon", "learning_rate": 1e-4},
    "muon in int8": {"name": "muon", "learning_rate": 1e-4, "moments": "int8"},
    "adafactor": {"name": "adafactor", "learning_rate": 0.03},
    "int8": {"moments": "int8", "learning_rate": 1e-4},
    "own": {"name": "Lion", "learning_rate": 1e-4, "options": {"beta": 0.8}},
}
MODELS = {"dense": CUTS, "experts": ("one rank", "tp2", "dp2 x tp2", "dp4 in two copies")}
CASES = [
    (optimizer, model, cut)
    for optimizer in OPTIMIZERS
    for model, cuts in MODELS.items()
    for cut in cuts
]
MAIN = [
    *(("muon", "dense", "dp2 x tp2"), ("muon", "experts", "dp2 x tp2"), ("muon", "dense", "pp2")),
    *(("adafactor", "experts", "dp2 x tp2"), ("adafactor", "dense", "dp4 in two copies")),
    *(("int8", "dense", "dp3"), ("own", "dense", "tp2")),
]


def make_engine(mesh, optimizer, model, folder):
    settings = dict(OPTIMIZERS[optimizer])
    if settings.get("name") == "Lion":
        settings["name"] = f"{folder / 'own.py'}:Lion"
    inner = make_model("qwen3_moe" if model == "experts" else "qwen2")
    engine = TrainEngine(
        CausalPolicy(inner), mesh, "float32", ActorConfig(tokens_per_microbatch=60)
    )
    engine.start_optimizer(OptimizerConfig(weight_decay=0.1, **settings), updates=6)
    return engine


def learn(engine, updates):
    for _ in range(updates):
        engine.update(mine(engine.mesh), CLIPPED, temperature=TEMPERATURE)
    return parts(engine)


def program(rank, folder, cases):
    meshes = {
        name: ParallelMesh(build_training_mesh(ranks, parallel, 1), CPU, parallel.shards)
        for name, (ranks, parallel) in CUTS.items()
    }
    found = {}
    for case in cases:
        optimizer, model, cut = case
        if rank in meshes[cut].mesh.grid:
            engine = make_engine(meshes[cut], optimizer, model, folder)
            learn(engine, 2)
            save_training_state(engine, folder / " ".join(case))
            found[case, "goes on"] = learn(engine, 1)
    dist.barrier()
    for case in cases:
        optimizer, model, cut = case
        for reader, written in ((cut, cut), (cut, "one rank"), ("one rank", cut)):
            if rank in meshes[reader].mesh.grid:
                engine = make_engine(meshes[reader], optimizer, model, folder)
                learn(engine, 1)  # to be forgotten
                load_training_state(engine, folder / " ".join((optimizer, model, written)))
                found[case, reader, written] = learn(engine, 1)
    return found


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    (folder / "own.py").write_text(OWN)
    cases = chosen_of(request, "optimizer", "model", "cut")
    alone = [(optimizer, model, "one rank") for optimizer, model, _ in cases]
    every = list(dict.fromkeys([*alone, *cases]))
    return run_ranks(program, tmp_path_factory.mktemp("ranks"), WORLD, folder, every)


def of(ranks, *key):
    return assemble([rank[key] for rank in ranks if key in rank])


@pytest.mark.parametrize(("optimizer", "model", "cut"), few_of(CASES, MAIN, several=True))
def test_a_cut_changes_neither_steps_nor_what_is_resumed(ranks, optimizer, model, cut):
    case, alone = (optimizer, model, cut), (optimizer, model, "one rank")
    expected, found = of(ranks, alone, "goes on"), of(ranks, case, "goes on")
    # Along a row that is cut, blocks of 8 bits are other ones.
    close = 1e-3 if "int8" in optimizer and "tp" in cut else 1e-5
    assert_close(found, expected, close)
    again = of(ranks, case, cut, cut)
    for name, tensor in found.items():
        assert torch.equal(again[name], tensor), name
    for reader, written in itertools.permutations((cut, "one rank"), 2):
        assert_close(of(ranks, case, reader, written), expected, close)
