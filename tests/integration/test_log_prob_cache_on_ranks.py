"""Cached log-probabilities where rows, layers or matrices are divided over ranks: all ranks agree
on what is computed, whatever each of them has found."""

import pytest
import torch
from ranks import run_ranks

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import ActorConfig, CacheConfig, ParallelConfig
from hybridrl.controller import WorkerContext
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.workers.reference_worker import ReferenceWorker
from hybridrl.workers.training_engines import ModelSource

PARALLEL = {"dp": {}, "tp": {"tp": 2}, "pp": {"pp": 2}, "ulysses": {"ulysses": 2}}


def program(rank, folder, parallel):
    source = ModelSource(str(folder / "model"), str(folder / "model"), "float32", 64, (1,))
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 12, (length,), generator=generator) for length in (4, 7, 2, 5)]
    batch = Batch.from_columns({"prompt_ids": ids[::-1], "response_ids": ids})
    if not parallel:  # each rank has rows of its own
        batch = batch.take([0, 1] if rank == 0 else [2, 3])

    def build(use):
        cache = CacheConfig(use=use, folder=str(folder / "cache"))
        worker = ReferenceWorker(
            *(WorkerContext("actor", rank, 2), source),
            ActorConfig(parallel=ParallelConfig(**parallel)),
            temperature=1.0,
            cache=cache,
        )
        forwards, forward = [], worker.model_engine.forward

        def counted(batch, **options):
            forwards.append(len(batch))
            return forward(batch, **options)

        worker.model_engine.forward = counted
        return worker, forwards

    def scored(worker, batch):
        return worker.compute_ref_log_prob(batch).ragged("ref_log_probs").values

    expected = scored(build([])[0], batch)
    worker, forwards = build(["log_probs"])
    # Without groups of their own, only the first rank has a row of the next call in the cache.
    scored(worker, batch.take([0]) if parallel or rank == 0 else batch.take([]))
    found = [scored(worker, batch), scored(worker, batch), scored(build(["log_probs"])[0], batch)]
    answers = not parallel or rank == ("pp" in parallel)  # the others' numbers are not read
    worst = max(float((one - expected).abs().max()) for one in found) if answers else 0.0
    return worst, forwards, dict(worker.record.metrics)


@pytest.mark.parametrize("kind", PARALLEL)
def test_ranks_compute_what_is_missing_together(tmp_path, kind):
    tokenizer = build_character_tokenizer("0123456789+=")
    shape = {"hidden_size": 16, "layers": 2, "heads": 4, "context": 64}
    make_tiny_model(tmp_path / "model", tokenizer, seed=0, **shape)
    found = run_ranks(program, tmp_path, 2, tmp_path, PARALLEL[kind])
    assert all(worst <= 1e-6 for worst, _, _ in found)
    forwards = [forwards for _, forwards, _ in found]
    assert forwards == ([[1, 1], [0, 2]] if kind == "dp" else [[1, 3], [1, 3]])
    asked = sum(metrics.get("cache_log_probs_asked", 0) for _, _, metrics in found)
    hits = sum(metrics.get("cache_log_probs_hits", 0) for _, _, metrics in found)
    assert (asked, hits) == (9, 5)
