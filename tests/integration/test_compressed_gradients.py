"""Real gloo: gradients that are summed with fewer bytes, on two and four ranks, against full."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from engine_cases import CPU, DEALS, LEARNING, deal, make_batch, make_engine, parameters, update
from ranks import run_ranks

from hybridrl.config.schema import ParallelConfig
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.parallel import fsdp
from hybridrl.parallel import gradient_reduction as gradients
from hybridrl.parallel.compressed_collectives import INT4_CODEC, INT8_CODEC
from hybridrl.parallel.process_group import ParallelMesh

WORLD = 4
# Name: setting, the node of each rank, and the relative error of a gradient that is expected.
ARMS = {
    "full": ("full", "aaaa", 1e-7),
    "bfloat16": ("bfloat16", "aaaa", 0.01),
    "int8": ("int8", "aaaa", 0.02),
    "one node": ("two_level_int4", "aaaa", 0.02),
    "two nodes": ("two_level_int4", "aabb", 0.2),
    "two nodes, interleaved": ("two_level_int4", "abab", 0.2),
    "four nodes": ("two_level_int4", "abcd", 0.2),
}
ENCODED = [arm for arm in ARMS if arm not in ("full", "bfloat16")]
SIZES = (1, 127, 128, 1000)


def values_of(rank, ranks, size):
    generator = torch.Generator().manual_seed(100 * rank + size)
    return torch.randn(ranks * size, generator=generator)


def sums(mesh, rank, ranks):
    """Bare sums of a part for each rank, what encoding may lose of them, and one of a NaN."""
    reduce, group, found = mesh.reduce_scatter, mesh.fsdp.get_group(), {}
    for size in SIZES:
        total = torch.empty(size)
        given = values_of(rank, ranks, size)
        reduce(total, given, group, dist.ReduceOp.SUM)
        assert given.equal(values_of(rank, ranks, size))
        found[size] = total
    spoilt = torch.ones(ranks * 8)
    spoilt[8:16] = torch.nan if rank == 0 else 1.0
    found["nan"] = torch.empty(8)
    reduce(found["nan"], spoilt, group, dist.ReduceOp.SUM)
    return found


def rank_program(rank):
    found = {"nodes": gradients._find_node_addresses()}
    for ranks in (2, WORLD):
        for name, (kind, nodes, _) in ARMS.items():
            gradients._find_node_addresses = lambda nodes=nodes: list(nodes)
            mesh = ParallelMesh(RankMesh({"dp": ranks}), CPU, gradients=kind)
            if rank >= ranks:
                continue
            fsdp.SMALL_MODEL_BYTES = 0 if name == "int8" else 1 << 20
            engine = make_engine(mesh, parallel=ParallelConfig(gradients=kind))
            mine = make_batch().take(deal(make_batch(), DEALS[ranks][0])[rank])
            gradient, metrics = update(engine, mine)
            found[ranks, name] = {"gradient": gradient, "norm": metrics["grad_norm"]}
            if mesh.reduce_scatter is not None:
                found[ranks, name]["sums"] = sums(mesh, rank, ranks)
    gradients._find_node_addresses = lambda: list("aabb")
    mesh = ParallelMesh(RankMesh({"dp": WORLD}), CPU, shards=2, gradients="two_level_int4")
    unclipped = replace(LEARNING, max_grad_norm=0.0)
    engine = make_engine(
        mesh, optimizer=unclipped, parallel=ParallelConfig(shards=2, gradients="two_level_int4")
    )
    mine = make_batch().take(deal(make_batch(), DEALS[WORLD][0])[rank])
    found["copies"] = update(engine, mine)[0], parameters(engine)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of four processes found."""
    return run_ranks(rank_program, tmp_path_factory.mktemp("ranks"), WORLD)


def off(ours, exact):
    return float((ours - exact).norm() / exact.norm())


@pytest.mark.parametrize("ranks", [2, WORLD])
@pytest.mark.parametrize("arm", ARMS)
def test_an_update_has_the_gradient_of_full_sums_but_for_what_codes_lose(found, ranks, arm):
    exact = found[0][ranks, "full"]
    most = ARMS[arm][2]
    for rank in range(ranks):
        ours = found[rank][ranks, arm]
        assert off(ours["gradient"], exact["gradient"]) <= most
        assert ours["gradient"].equal(found[0][ranks, arm]["gradient"])
        assert ours["norm"] == pytest.approx(exact["norm"], rel=most)
    if arm != "full":  # else nothing was encoded
        assert off(found[0][ranks, arm]["gradient"], exact["gradient"]) > 1e-5


@pytest.mark.parametrize("ranks", [2, WORLD])
@pytest.mark.parametrize("arm", ENCODED)
def test_each_rank_gets_the_sum_of_its_part(found, ranks, arm):
    for size in SIZES:
        exact = sum(values_of(rank, ranks, size) for rank in range(ranks)).view(ranks, size)
        for rank in range(ranks):
            ours = found[rank][ranks, arm]["sums"][size]
            assert off(ours, exact[rank]) <= ARMS[arm][2]


@pytest.mark.parametrize("arm", ENCODED)
def test_a_gradient_that_is_no_number_arrives_where_it_belongs(found, arm):
    assert found[1][WORLD, arm]["sums"]["nan"].isnan().all()
    assert found[1][2, arm]["sums"]["nan"].isnan().all()


def test_ranks_of_one_machine_are_of_one_node(found):
    assert all(one["nodes"] == ["127.0.0.1"] * WORLD for one in found)


def test_copies_of_the_shards_stay_equal(found):
    exact = found[0][WORLD, "full"]["gradient"]
    for rank in range(WORLD):
        gradient, weights = found[rank]["copies"]
        assert 1e-5 < off(gradient, exact) <= 0.02
        assert weights.equal(found[0]["copies"][1])


def test_bytes_between_ranks_are_as_few_as_promised():
    numel = 1_000_000
    assert 4 * numel / INT8_CODEC.size(numel) >= 3.9
    assert 4 * numel / INT4_CODEC.size(numel) >= 7.4
