"""Distillation: cuts of student and teacher change nothing; the main job learns from teachers."""

import json

import pytest
import torch
import torch.distributed as dist
from engine_cases import CPU, TEMPERATURE, deal, make_batch
from parallel_cases import assemble, assert_close, make_engine, make_model
from ranks import run_ranks
from settings import LEARNS, SHORT

from hybridrl.algorithms import DistillationObjective
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import ParallelConfig
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.layout.training_mesh import build_training_mesh
from hybridrl.parallel.process_group import ParallelMesh

pytestmark = pytest.mark.more

WORLD, TOP_K = 4, 5
CUTS = {
    "dp2": (2, ParallelConfig()),
    "tp4": (4, ParallelConfig(tp=4)),
    "tp2 x ring2": (4, ParallelConfig(tp=2, ring=2)),
    "pp2 x ulysses2": (4, ParallelConfig(pp=2, ulysses=2)),
}
DEALS = {1: [11], 2: [7, 4]}
KINDS = ("reverse", "forward")
COLUMNS = ("ids", "log_probs")


def teacher_model():
    model = make_model()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def program(rank):
    """Gradients of the student, and what the teacher says, on each mesh that a rank is in."""
    meshes = {"one rank": ParallelMesh(RankMesh({"dp": 1}), CPU)}
    for name, (ranks, parallel) in CUTS.items():
        meshes[name] = ParallelMesh(build_training_mesh(ranks, parallel, 1), CPU, None)
    batch = make_batch()
    said = [None]
    if rank == 0:
        alone = make_engine(meshes["one rank"], teacher_model())
        said = [alone.forward(batch, temperature=TEMPERATURE, top_k=TOP_K).to_pylist()]
    dist.broadcast_object_list(said)
    rows = {name: [torch.tensor(row[f"top_{name}"]) for row in said[0]] for name in COLUMNS}
    taught = batch.with_columns(
        {f"teacher_{name}": Batch.from_columns(rows)[name] for name in COLUMNS}
    )
    found = {}
    for cut, mesh in meshes.items():
        if rank not in mesh.mesh.grid:
            continue
        dp = mesh.mesh.axes["dp"]
        mine = taught.take(deal(batch, DEALS[dp])[mesh.index("dp")])
        teacher = make_engine(mesh, teacher_model(), tokens_per_microbatch=60)
        heard = teacher.forward(mine, temperature=TEMPERATURE, top_k=TOP_K)
        found[cut] = {
            "heard": {name: heard[name].values for name in ("top_ids", "top_log_probs")},
            "taught": {"top_ids": mine["teacher_ids"].values},
            "says": mesh.index("pp") == mesh.size("pp") - 1,
        }
        for kind in KINDS:
            engine = make_engine(mesh, tokens_per_microbatch=60)
            loss = DistillationObjective(kind)
            metrics = engine.update(mine, loss, temperature=TEMPERATURE, **loss.options)
            found[cut][kind] = engine.first_gradient, metrics["loss"]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(program, tmp_path_factory.mktemp("ranks"), WORLD)


@pytest.mark.parametrize("cut", CUTS)
def test_cuts_change_neither_what_is_learned_nor_what_is_said(ranks, cut):
    (one,) = [rank["one rank"] for rank in ranks if "one rank" in rank]
    found = [rank[cut] for rank in ranks if cut in rank]
    assert len(found) == CUTS[cut][0]
    for kind in KINDS:
        gradient = assemble([one[kind][0]])
        assert_close(assemble([rank[kind][0] for rank in found]), gradient, 1e-4)
        for rank in found:
            assert rank[kind][1] == pytest.approx(one[kind][1], rel=1e-4)
    for rank in found:
        if rank["says"]:
            assert torch.equal(rank["heard"]["top_ids"], rank["taught"]["top_ids"])


def test_the_main_job_learns_from_teachers_by_source(run, tmp_path):
    rows = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "source": "odd" if a % 2 else "even"}
        for a in range(8)
        for b in range(5)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = run(*SHORT, *LEARNS, "rollout=transformers", "trainer.steps=1") / "model"
    folder = run(
        *(*SHORT, "algorithm=distillation", "rollout=transformers", "trainer.steps=3"),
        *("data=jsonl", f"data.path={tmp_path}/rows.jsonl", "rollout.max_tokens=8"),
        *(f"model.path={model}", "warmup.steps=0", f"run.directory={tmp_path}/student"),
        *("distillation.by=source", f"models.teacher_odd.path={model}"),
        f"models.teacher.path={model}",
    )
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["policy/loss"] for row in steps if "policy/loss" in row]
    assert len(losses) == 3 and losses[0] < 1e-3  # a copy of its teachers
