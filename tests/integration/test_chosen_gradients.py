"""Real gloo: `parallel.gradients=auto`, on two and four ranks, against full."""

import json
from dataclasses import replace

import pytest
import torch
from engine_cases import CPU, DEALS, deal, make_batch, make_engine, update
from ranks import run_ranks
from settings import SHORT

from hybridrl.config.schema import ParallelConfig
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.parallel import fsdp
from hybridrl.parallel import gradient_reduction as gradients
from hybridrl.parallel import measured_reduction as measured_sums
from hybridrl.parallel import reduction_timing as sum_times
from hybridrl.parallel.process_group import ParallelMesh
from hybridrl.parallel.reduction_choice import FULL_REDUCTION, ZERO_COST, CostCurve, HopCost

pytestmark = pytest.mark.more

WORLD = 4
# Name: ranks, the node of each, and the ways that there are beside `full` with the error of each.
TWO_LEVELS = {
    **{"float32+float32": 1e-6, "int8+float32": 0.02, "float32+int8": 0.02, "int8+int8": 0.03},
    **{"float32+int4": 0.2, "int8+int4": 0.2},
}
ONE_HOP = {"float32": 1e-6, "int8": 0.02}
CASES = {
    "one node": (2, "aaaa", ONE_HOP),
    "a rank on each node": (2, "abab", {**ONE_HOP, "int4": 0.2}),
    "two nodes": (4, "abab", {**ONE_HOP, **TWO_LEVELS}),
    "uneven nodes": (4, "aaab", ONE_HOP),
}


def engine_of(ranks, nodes, kind="auto"):
    gradients._find_node_addresses = lambda: list(nodes)
    mesh = ParallelMesh(RankMesh({"dp": ranks}), CPU, gradients=kind)
    if torch.distributed.get_rank() >= ranks:
        return None
    return make_engine(mesh, parallel=ParallelConfig(gradients=kind))


def price(engine, cheapest, factor=1e-3):
    """Has all sums cost a second, but for one way; and chooses."""
    sums = engine.mesh.reduce_scatter
    second = HopCost(1.0, ZERO_COST, CostCurve(((0.0, 1.0), (1.0, 1.0))))
    cheap = HopCost(1.0, ZERO_COST, CostCurve(((0.0, factor), (1.0, factor))))
    sums._costs = [
        replace(way, parts=(cheap if way.name == cheapest else second,)) for way in sums._costs
    ]
    sums._choose()
    return sums


def one_update(engine, rank, ranks):
    return update(engine, make_batch().take(deal(make_batch(), DEALS[ranks][0])[rank]))[0]


def drifting(rank):
    """An engine whose sums seem to take a thousand times what was measured, then what they do."""
    engine, measured_sums.MIN_TIME_SHARE = engine_of(2, "aaaa"), 0.0
    if engine is None:
        return None
    said = engine.take_said()
    sums, told = price(engine, "int8", 1e-9), []
    for _ in range(measured_sums.DRIFTED_UPDATES):
        told.append(sums.measurements)
        one_update(engine, rank, 2)
    return said, told, sums.measurements, engine.take_said(), engine.take_said()


def rank_program(rank):
    fsdp.SMALL_MODEL_BYTES = 0
    sum_times.MIN_VALUES, sum_times.MIN_REPEATS, sum_times.MOST_TURNS = 1 << 8, 1, 1
    found = {}
    for name, (ranks, nodes, _) in CASES.items():
        exact, engine = engine_of(ranks, nodes, "full"), engine_of(ranks, nodes)
        if rank >= ranks:
            continue
        found[name, FULL_REDUCTION] = one_update(exact, rank, ranks)
        sums = engine.mesh.reduce_scatter
        costs = sums._costs
        found[name] = {
            "values": sums._values,
            "costs": costs,
            "choice": sums.choice,
            "parameters": [
                sum(p.numel() for p in u) for u in fsdp.list_unit_parameters(engine.model)
            ],
        }
        for way in costs:
            price(engine, way.name)
            found[name, way.name, "chosen"] = sums.choice.ways
            found[name, way.name] = one_update(engine, rank, ranks)
    found["drift"] = drifting(rank)
    mesh = ParallelMesh(RankMesh({"dp": WORLD}), CPU, shards=2, gradients="auto")
    engine = make_engine(mesh, parallel=ParallelConfig(shards=2, gradients="auto"))
    price(engine, "int8")
    found["copies"] = one_update(engine, rank, WORLD)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of four processes found."""
    return run_ranks(rank_program, tmp_path_factory.mktemp("ranks"), WORLD)


@pytest.mark.parametrize("case", CASES)
def test_every_way_gives_the_gradient_but_for_what_its_codes_lose(found, case):
    ranks, _, errors = CASES[case]
    exact = found[0][case, FULL_REDUCTION]
    assert {way.name for way in found[0][case]["costs"]} == {FULL_REDUCTION, *errors}
    for name, most in {FULL_REDUCTION: 1e-6, **errors}.items():
        assert set(found[0][case, name, "chosen"]) == {name}
        for rank in range(ranks):
            ours = found[rank][case, name]
            off = float((ours - exact).norm() / exact.norm())
            assert (1e-5 if most > 1e-5 else 0) <= off <= most
            assert ours.equal(found[0][case, name])


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_measured_the_same_and_choose_alike(found, case):
    first = found[0][case]
    assert first["values"] == first["parameters"]
    assert len(first["choice"].ways) == len(first["values"]) > 2
    for rank in range(CASES[case][0]):
        assert found[rank][case]["costs"] == first["costs"]
        assert found[rank][case]["choice"] == first["choice"]
    assert all(way.codec(1000) + way.link(1000) > 0 for way in first["costs"])


def test_ranks_that_hold_copies_get_the_same(found):
    exact = found[0]["two nodes", FULL_REDUCTION]
    for rank in range(WORLD):
        ours = found[rank]["copies"]
        assert 1e-5 < float((ours - exact).norm() / exact.norm()) <= 0.02
        assert ours.equal(found[0]["copies"])


def test_a_link_that_drifts_is_measured_again(found):
    for rank in range(2):
        said, told, measured, again, later = found[rank]["drift"]
        assert "parallel.gradients=auto" in said[0]
        assert told == [1] * measured_sums.DRIFTED_UPDATES
        assert measured == 2
        assert "measured again" in again[0]
        assert later == []
    assert found[0]["drift"][3] == found[1]["drift"][3]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("ranks", "kind", "stages"),
    [(2, "int8", 1), (4, "int8", 1), (2, "auto", 1), (4, "auto", 1), (4, "auto", 2)],
)
def test_the_main_program_sums_so_over_ray_and_says_what_auto_chose(
    run, capsys, ranks, kind, stages
):
    folder = run(
        *(*SHORT, f"num_devices={ranks}", "rollout=transformers"),
        *("trainer.steps=1", f"actor.parallel.gradients={kind}"),
        f"actor.parallel.pp={stages}",
        "ray.address=auto",  # where there may be more devices than this machine has cores
    )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert any("policy/grad_norm" in json.loads(line) for line in lines)
    said = capsys.readouterr().out.split("actor: parallel.gradients=auto:")[1:]
    first = [one for one in said if not one.startswith(" in ")]  # others: measured again
    assert len(first) == (1 if kind == "auto" else 0)
