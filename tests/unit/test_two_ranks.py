"""Two ranks that learn together, as threads of this process: which of them has which rows of a
mini-batch changes nothing, whether they share parameters or each has all."""

import copy
import threading

import engine_cases
import pytest
import torch
import torch.distributed as dist
from engine_cases import (
    CLIPPED,
    CPU,
    DEALS,
    assert_same_gradient,
    assert_same_metrics,
    deal,
    expectations,
    make_batch,
    make_engine,
    update,
)
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.parallel.process_group import ParallelMesh

RANKS = 2


def on_ranks(program):
    """What `program(rank)` gives on each rank."""
    found, errors, store = [None] * RANKS, [], dist.HashStore()

    def run(rank):
        dist.init_process_group("threaded", rank=rank, world_size=RANKS, store=store)
        try:
            found[rank] = program(rank)
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)  # nobody waits for this rank
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return found


@pytest.mark.parametrize("shards", [2, 1], ids=["shared", "copied"])
@pytest.mark.parametrize("counts", DEALS[RANKS])
def test_any_deal_gives_the_gradient_and_the_metrics_of_the_whole(monkeypatch, counts, shards):
    model, batch = engine_cases.make_model(), make_batch()
    # Made once: threads share the generator that weights are drawn from.
    monkeypatch.setattr(engine_cases, "make_model", lambda: copy.deepcopy(model))
    rows = deal(batch, counts)

    def program(rank):
        mesh = ParallelMesh(RankMesh({"dp": RANKS}), CPU, shards)
        engine = make_engine(mesh, tokens_per_microbatch=60)
        return update(engine, batch.take(rows[rank]))

    gradient, expected = expectations()("token-mean", CLIPPED)
    for found, metrics in on_ranks(program):
        assert_same_gradient(found, gradient)
        assert_same_metrics(metrics, expected)
