"""Real gloo: cutting a model over ranks, in one way or several, never changes the mathematics."""

import pytest
import torch
from engine_cases import CPU, deal, make_batch
from parallel_cases import assemble, assert_close, learn, make_engine, make_model
from ranks import run_ranks
from tiers import chosen_of, few_of

from hybridrl.config.schema import ParallelConfig
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.layout.training_mesh import build_training_mesh
from hybridrl.parallel import fsdp
from hybridrl.parallel.process_group import ParallelMesh

WORLD = 4
# Ranks, how they are cut, ranks that share a copy while generating.
CUTS = {
    "dp2": (2, ParallelConfig(), 1),
    "dp4": (4, ParallelConfig(), 1),
    "tp2": (2, ParallelConfig(tp=2), 1),
    "tp4": (4, ParallelConfig(tp=4), 1),
    "tp4, numbered for two replicas of two": (4, ParallelConfig(tp=4), 2),
    "dp2 x tp2": (4, ParallelConfig(tp=2), 1),
    "tp2 x pp2": (4, ParallelConfig(tp=2, pp=2), 1),
    "tp2 x pp2, numbered for two replicas of two": (4, ParallelConfig(tp=2, pp=2), 2),
    "tp2 x ring2": (4, ParallelConfig(tp=2, ring=2), 1),
    "pp2 x ulysses2": (4, ParallelConfig(pp=2, ulysses=2), 1),
    "dp2 x tp2, every dp rank with a copy": (4, ParallelConfig(tp=2, shards=1), 1),
}
MODELS = {
    "qwen2, tied, 2 key-value heads": {"architecture": "qwen2"},
    "qwen3, untied, 1 key-value head": {
        "architecture": "qwen3",
        "key_value_heads": 1,
        "tied": False,
    },
    "llama, tied, 4 key-value heads": {"architecture": "llama", "key_value_heads": 4},
    "qwen3 of experts, untied": {"architecture": "qwen3_moe", "tied": False},
    "qwen3 of 3 experts": {"architecture": "qwen3_moe", "experts": 3},
}
DEALS = {1: [11], 2: [7, 4], 4: [7, 1, 0, 3]}
# Cuts that take 8 steps with the first model, and 2 with others.
LONG = ("one rank", "dp2", "tp2", "dp2 x tp2", "tp2 x pp2")


FIRST, *OTHERS = MODELS
# All cuts of the first model, and a cut for each other one.
CASES = [(cut, model) for cut in CUTS for model in MODELS]
MAIN = [(cut, FIRST) for cut in CUTS]
MAIN += zip(("dp2", "tp2", "dp2 x tp2", "tp2 x pp2"), OTHERS, strict=True)


def program(rank, wanted):
    """What one of four processes makes of models, as they are cut."""
    meshes = {"one rank": ParallelMesh(RankMesh({"dp": 1}), CPU)}
    for name, (ranks, parallel, rollout_tp) in CUTS.items():
        mesh = build_training_mesh(ranks, parallel, rollout_tp)
        meshes[name] = ParallelMesh(mesh, CPU, parallel.shards)
    batch = make_batch()
    found = {}
    for cut, mesh in meshes.items():
        for model, settings in MODELS.items():
            if rank not in mesh.mesh.grid or (cut, model) not in wanted:
                continue
            dp = mesh.mesh.axes["dp"]
            mine = batch.take(deal(batch, DEALS[dp])[mesh.index("dp")])
            # Of this one every layer, the embedding and the head are gathered for themselves.
            in_units = "untied" in model and cut != "one rank"
            fsdp.SMALL_MODEL_BYTES = 0 if in_units else 1 << 28
            splits = cut != "one rank" and "ring" not in cut
            kept = "selective" if "llama" in model and splits else "none"
            weight = 0.1 if settings["architecture"] == "qwen3_moe" else 0.0
            engine = make_engine(
                mesh,
                make_model(**settings),
                tokens_per_microbatch=60,
                gradient_checkpointing=kept,
                router_loss_weight=weight,
            )
            steps = 8 if cut in LONG and model == FIRST else 2
            found[cut, model] = learn(engine, mine, steps) | {
                "dp": mesh.index("dp"),
                "dp ranks": dp,
                "says": mesh.index("pp") == mesh.size("pp") - 1,
            }
    return found


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    wanted = {*chosen_of(request, "cut", "model"), ("dp4", "qwen3 of 3 experts")}
    wanted |= {("one rank", model) for model in MODELS}
    return run_ranks(program, tmp_path_factory.mktemp("ranks"), WORLD, wanted)


@pytest.mark.parametrize(("cut", "model"), few_of(CASES, MAIN, several=True))
def test_all_is_as_on_one_rank(ranks, cut, model):
    (one,) = [rank["one rank", model] for rank in ranks if ("one rank", model) in rank]
    found = [rank[cut, model] for rank in ranks if (cut, model) in rank]
    assert len(found) == CUTS[cut][0]
    gradient = assemble([one["gradient"]])
    assert_close(assemble([rank["gradient"] for rank in found]), gradient, 1e-4)
    if cut in LONG:
        assert_close(assemble([rank["after"] for rank in found]), assemble([one["after"]]), 1e-3)
    for rank in found:
        for step, wanted in zip(rank["curve"], one["curve"], strict=False):
            assert step == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        if not rank["says"]:
            continue
        rows = deal(make_batch(), DEALS[rank["dp ranks"]])[rank["dp"]]
        order = deal(make_batch(), [11])[0]
        by_row = dict(zip(order, one["before"], strict=True))
        for row, values in zip(rows, rank["before"], strict=True):
            for name, wanted in by_row[row].items():
                assert values[name] == pytest.approx(wanted, rel=1e-5, abs=1e-5)


def test_every_rank_has_a_part_of_fewer_experts_than_ranks(ranks):
    for rank in ranks:
        for name, (shape, _, local) in rank["dp4", "qwen3 of 3 experts"]["after"].items():
            if ".mlp." in name:
                assert local.numel() == torch.Size(shape).numel() // 4, name
