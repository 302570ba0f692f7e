"""Real gloo: how a batch is split over ranks never changes the mathematics."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from engine_cases import (
    BUDGETS,
    CLIPPED,
    CPU,
    DEALS,
    LEARNING,
    LONGEST,
    TEMPERATURE,
    WHOLE_SAMPLES,
    WORLD,
    assert_same_gradient,
    assert_same_metrics,
    deal,
    expectations,
    make_batch,
    make_engine,
    make_model,
    parameters,
    update,
)
from ranks import run_ranks

from hybridrl.algorithms.token_weighting import AGGREGATION_MODES
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.models.packed_samples import PackedSamples
from hybridrl.parallel import fsdp
from hybridrl.parallel.process_group import ParallelMesh


def cases():
    """(ranks, deal, budget, mode, objective, small) of every update of the distributed run."""
    for ranks, deals in DEALS.items():
        for (i, counts), (j, mode) in itertools.product(
            enumerate(deals), enumerate(AGGREGATION_MODES)
        ):
            yield ranks, counts, BUDGETS[(i + j) % len(BUDGETS)], mode, CLIPPED, True
        yield ranks, deals[-1], LONGEST, AGGREGATION_MODES[1], WHOLE_SAMPLES, True
        yield ranks, deals[-1], LONGEST, AGGREGATION_MODES[0], CLIPPED, False


def rank_program(rank):
    """What each of four processes does and finds; tests compare."""
    meshes = {n: ParallelMesh(RankMesh({"dp": n}), CPU) for n in (1, 2)}
    meshes[WORLD] = ParallelMesh(RankMesh({"dp": WORLD}), CPU)
    found = {"updates": {}, "forwards": {}}
    engines = {}
    for case in cases():
        ranks, counts, budget, mode, objective, small = case
        if rank >= ranks:
            continue
        if (ranks, small) not in engines:
            fsdp.SMALL_MODEL_BYTES = 1 << 20 if small else 0
            engines[ranks, small] = make_engine(meshes[ranks])
        engine = engines[ranks, small]
        engine.config = replace(engine.config, tokens_per_microbatch=budget)
        batch = make_batch(mode)
        mine = batch.take(deal(batch, counts)[rank])
        found["updates"][str(case)] = update(engine, mine, objective)
        if mode == AGGREGATION_MODES[0]:
            scored = engine.forward(mine, temperature=TEMPERATURE)
            found["forwards"][str(case)] = scored.to_pylist()
    if rank < 2:
        found["spoiled"] = spoil(make_engine(meshes[2], optimizer=LEARNING), rank)
    return found


def spoil(engine, rank):
    """Two updates of two ranks; in the first one a sample of rank 1 has no finite advantage."""
    batch = make_batch()
    mine = batch.take(deal(batch, (6, 5))[rank])
    bad = mine["advantages"].clone()
    bad[0] = math.inf if rank == 1 else bad[0]
    before = parameters(engine)
    norm = engine.update(mine.with_columns({"advantages": bad}), CLIPPED)["grad_norm"]
    between = parameters(engine)
    engine.update(mine, CLIPPED)
    return norm, torch.equal(before, between), torch.equal(before, parameters(engine))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """What each of four processes found."""
    return run_ranks(rank_program, tmp_path_factory.mktemp("ranks"), WORLD)


@pytest.fixture(scope="module")
def plain():
    return expectations()


@pytest.mark.parametrize("ranks", DEALS)
def test_any_split_over_ranks_and_micro_batches_gives_one_gradient(ranks, four_ranks, plain):
    mine = [case for case in cases() if case[0] == ranks]
    assert {case[3] for case in mine} == set(AGGREGATION_MODES)
    for case in mine:
        _, _, _, mode, objective, _ = case
        gradient, metrics = plain(mode, objective)
        for rank in range(ranks):
            found, of_rank = four_ranks[rank]["updates"][str(case)]
            assert_same_gradient(found, gradient)
            assert_same_metrics(of_rank, metrics)


@pytest.mark.parametrize("ranks", DEALS)
def test_forward_gives_each_rank_its_rows_in_order(ranks, four_ranks):
    batch = make_batch()
    exact = CausalPolicy(make_model())(PackedSamples.of(batch, CPU), TEMPERATURE)
    bounds = batch["response_ids"].cu_seqlens.tolist()
    for case in (case for case in cases() if case[0] == ranks and case[3] == AGGREGATION_MODES[0]):
        for rank, rows in enumerate(deal(batch, case[1])):
            scored = four_ranks[rank]["forwards"][str(case)]
            assert len(scored) == len(rows)
            for row, found in zip(rows, scored, strict=True):
                for name, column in exact.items():
                    wanted = column[bounds[row] : bounds[row + 1]].tolist()
                    assert found[name] == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_a_rank_without_a_finite_gradient_stops_the_step_of_all(four_ranks):
    for rank in range(2):
        norm, unchanged, unchanged_at_the_end = four_ranks[rank]["spoiled"]
        assert not math.isfinite(norm)
        assert unchanged and not unchanged_at_the_end
