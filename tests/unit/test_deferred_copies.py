"""Whoever reads a copy that does not block waits for it: as on an accelerator, these tests' copies
end after the calls that begin them."""

import ast
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from deferred_copies import IN_ORDER, PACKAGE, DeferredCopies
from engine_cases import CPU, LEARNING, make_batch, make_engine, parameters
from package_trees import tree_of
from tiers import few_of
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridrl.algorithms import negative_log_likelihood
from hybridrl.checkpoint.engine_state.state_saver import EngineStateSaver
from hybridrl.checkpoint.engine_state.training_state import load_training_state
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.parallel import fsdp
from hybridrl.parallel.process_group import ParallelMesh

RANKS = [(2, 1), (3, 0), (3, 2), (5, 4), (6, 5), (7, 6), (8, 7), (12, 11), (24, 22), (24, 23)]
"""So many ranks, and the one of them that is tried; tensors have 16, 23 or 24 rows."""
OFFLOAD = {("engine/train_engine.py", n) for n in ("_to_host", "onload", "_move_optimizer")}
MOMENTS = {("engine/moment_storage.py", name) for name in ("_bring", "_put_away")}
CODES = {("compress/dynamic_codes.py", "to")}
CHECKPOINT = {("checkpoint/engine_state/async_saving.py", "fill")}
"""The functions of the package that make copies that do not block, by what a test has them do."""


@pytest.fixture
def copies(monkeypatch):
    monkeypatch.setattr(fsdp, "SMALL_MODEL_BYTES", 0)
    return DeferredCopies(monkeypatch)


@pytest.fixture
def engine_of(process_group):
    """Makes the engine of one rank, of which the others are not there."""

    def make(ranks, rank):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        engine = make_engine(ParallelMesh(RankMesh({"dp": ranks}), CPU))
        for parameter in engine.model.parameters():
            moments = {name: torch.rand_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            engine.optimizer.state[parameter] = moments
        engine._offloads_all = True
        return engine

    yield make
    dist.destroy_process_group()


def parts_of(engine):
    """This rank's parts of weights and moments, as they are now."""
    found = {name: part.clone() for name, part in engine.local_parameters().items()}
    for number, moments in enumerate(engine.optimizer.state.values()):
        found |= {f"{n} {number}": part.to_local().clone() for n, part in moments.items()}
    return found


def differing(found, wanted):
    assert wanted and found.keys() == wanted.keys()
    return {name for name in wanted if not torch.equal(found[name], wanted[name])}


@pytest.mark.parametrize(("ranks", "rank"), few_of(RANKS, RANKS[1::2], several=True))
def test_a_model_that_makes_room_keeps_its_weights_and_moments(copies, engine_of, ranks, rank):
    """FSDP pads shards that are uneven on the host, as soon as it has them there."""
    engine = engine_of(ranks, rank)
    before = parts_of(engine)
    for _ in range(2):
        engine.offload()
        assert not copies.under_way and not differing(parts_of(engine), before)
        with copies.from_host():
            engine.onload()
        assert not differing(parts_of(engine), before)
    assert copies.places == OFFLOAD


def test_a_copy_that_is_read_too_early_is_seen(copies, engine_of):
    engine = engine_of(3, 2)
    before = parts_of(engine)
    engine.model.to("cpu", non_blocking=True)  # as offloading once did
    copies.arrive()
    assert differing(parts_of(engine), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_moments_that_rest_on_the_host_come_in_time(copies, mesh, dtype):
    found = []
    for hosts in (False, True):
        engine = make_engine(mesh)
        engine._hosts_moments = hosts
        engine.start_optimizer(replace(LEARNING, moments=dtype), updates=10)
        for _ in range(3):
            engine.update(make_batch(), likelier)
            engine.put_optimizer_away()
        found.append(parameters(engine))
    assert not copies.under_way and torch.equal(*found)
    assert copies.places == MOMENTS | (CODES if dtype == "int8" else set())


def likelier(outputs, columns, segments):
    return negative_log_likelihood(outputs["log_probs"])


def test_a_checkpoint_is_written_when_its_copy_is_there(copies, mesh, tmp_path):
    engine = make_engine(mesh, optimizer=LEARNING)
    engine.update(make_batch(), likelier)
    wanted, saver = parameters(engine), EngineStateSaver(engine)
    saver.start(tmp_path, {}, {})
    engine.update(make_batch(), likelier)
    saver.finish(wait=True)
    other = make_engine(mesh, optimizer=LEARNING)
    load_training_state(other, tmp_path)
    assert not copies.under_way and torch.equal(parameters(other), wanted)
    assert copies.places == CHECKPOINT


def test_every_copy_that_does_not_block_is_made_here():
    """A new one needs a test here that sees whether anything reads it too early."""
    written = {
        (file.relative_to(PACKAGE).as_posix(), function.name)
        for file in PACKAGE.rglob("*.py")
        if "non_blocking" in file.read_text()  # parsing all files takes seconds
        for function in ast.walk(tree_of(file))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.keyword) and node.arg == "non_blocking"
    }
    assert written == OFFLOAD | MOMENTS | CODES | CHECKPOINT | {IN_ORDER}
