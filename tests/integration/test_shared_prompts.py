"""Real gloo: a shared prompt on several ranks gives what plain torch makes of each row alone; and
whole jobs on several devices."""

import runpy
from pathlib import Path

import plain_torch
import pytest
import torch
import torch.distributed as dist
from parallel_cases import assemble, parts
from plain_cases import CUTTABLE, make_folders, settings_of
from ranks import run_ranks
from tree_cases import CPU, LONGEST, TEMPERATURE, loss, make_engine, make_rows, work_out

from hybridrl.config.schema import ParallelConfig
from hybridrl.layout.training_mesh import build_training_mesh
from hybridrl.models.prompt_trees import PromptTrees
from hybridrl.parallel.process_group import ParallelMesh

pytestmark = pytest.mark.more
CLOSE = 1e-5
LAYOUTS = {
    **{name: {name: 2} for name in ("dp", "tp", "pp", "ulysses", "ring")},
    "ring and ulysses": {"ring": 2, "ulysses": 2},
    "tp and pp": {"tp": 2, "pp": 2},
    "dp and ring": {"dp": 2, "ring": 2},
    "ring of four": {"ring": 4},
}
BUDGETS = (LONGEST, 10_000)


def rank_program(rank):
    """What each of four ranks finds."""
    made, make = [], PromptTrees.of.__func__
    PromptTrees.of = classmethod(lambda cls, *given: made.append(1) or make(cls, *given))
    found, batch = {}, make_rows()
    for name, sizes in LAYOUTS.items():
        config = ParallelConfig(**sizes)
        ranks = torch.tensor(list(sizes.values())).prod().item()
        mesh = ParallelMesh(build_training_mesh(ranks, config), CPU)
        if rank >= ranks:
            continue
        # Groups are cut between ranks; one of them may have next to nothing.
        mine = batch
        if mesh.size("dp") > 1:
            mine = batch.slice(0, 10) if mesh.index("dp") == 0 else batch.slice(10, len(batch))
        for budget in BUDGETS:
            made.clear()
            settings = {"tokens_per_microbatch": budget, "parallel": config}
            engine = make_engine(mesh, **settings)
            scored = engine.forward(mine, temperature=TEMPERATURE)
            kept = {}
            engine.optimizer.register_step_pre_hook(
                lambda *_, engine=engine, kept=kept: kept.update(parts(engine, lambda p: p.grad))
            )
            metrics = engine.update(mine, loss, temperature=TEMPERATURE)
            found[name, budget] = {
                "scored": scored["log_probs"].values,
                "says": mesh.index("pp") == mesh.size("pp") - 1,
                "dp": mesh.index("dp") if mesh.size("dp") > 1 else 0,
                "metrics": metrics,
                "gradient": kept,
                "trees": len(made),
            }
        dist.barrier(mesh.group())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(rank_program, tmp_path_factory.mktemp("ranks"), 4)


@pytest.fixture(scope="module")
def expected():
    return work_out(make_rows())


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_find_what_plain_torch_does(found, expected, name, budget):
    ranks = [rank[name, budget] for rank in found if (name, budget) in rank]
    assert all(rank["trees"] for rank in ranks)
    for dp in {rank["dp"] for rank in ranks}:
        for rank in ranks:
            if rank["says"] and rank["dp"] == dp:
                said = rank["scored"]
        wanted = expected.log_probs
        if "dp" in LAYOUTS[name]:
            here = int(make_rows().slice(0, 10).lengths("response_ids").sum())
            wanted = wanted[:here] if dp == 0 else wanted[here:]
        torch.testing.assert_close(said, wanted, atol=CLOSE, rtol=0)
    for rank in ranks:
        assert rank["metrics"]["loss"] == pytest.approx(expected.loss, rel=CLOSE)
    gradient = assemble([rank["gradient"] for rank in ranks])
    for parameter, tensor in expected.gradient.items():
        off = (gradient[parameter] - tensor).norm()
        assert off <= CLOSE * tensor.norm().clamp(min=1), parameter


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        yield make_folders(root)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("program", "cut"),
    [("dpo", "ulysses"), ("grpo", "dp"), ("grpo", "ring"), ("dpo", "tp"), ("grpo", "ulysses")],
)
def test_a_job_on_ranks_is_what_plain_torch_makes_of_it(run, folders, program, cut):
    options = ["temperature", "two updates"] if program == "grpo" else []
    directory = run(
        *settings_of(program, options, folders),
        *(f"model.path={Path(folders.model).with_name(CUTTABLE)}", f"actor.parallel.{cut}=2"),
        *("actor.share_prefixes=true", "num_devices=2", "ray.address=auto"),
    )
    found = plain_torch.recompute(directory, runpy.run_path(folders.program)["digits"])
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=CLOSE)
