"""What the noise of a sample depends on: the generation that it is of, and its row in the driver's
table, whatever rank or replica draws it."""

import numpy as np
import pytest
import torch

from hybridrl.batch.batch import Batch
from hybridrl.controller import Worker, WorkerContext
from hybridrl.engine.hybrid_engine import add_response_mask
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.rollout.rollout_engine import (
    BatchedEngine,
    EngineOutput,
    SamplingSettings,
    build_response_batch,
)
from hybridrl.rollout.sample_generator import SampleGenerator, SampleStream, SingleTurnGenerator
from hybridrl.workers import generator_worker as generator
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.generation import SampleSeeds
from hybridrl.workers.generator_worker import GeneratorWorker

SAMPLING = SamplingSettings(max_tokens=4)
ROWS, PER_PROMPT = 12, 3


def one_token_each(ids):
    return build_response_batch([EngineOutput(0, [], [one], [0.0], "stop") for one in ids])


class Engine(BatchedEngine):
    """Answers with its seed."""

    cost, rollout = None, property(SingleTurnGenerator)

    def generate(self, batch, sampling, seed):
        samples = one_token_each(seed)
        return add_response_mask(samples).with_columns({"policy_version": torch.zeros(len(seed))})

    def poll(self):
        waiting, self._waiting = self._waiting, []
        return [EngineOutput(r.key, r.prompt_ids, [r.seed], [0.0], "stop") for r in waiting]

    def load(self, weights):
        raise NotImplementedError


class Player(SampleGenerator):
    """Plays episodes whose only token is their seed."""

    def begin(self, task):
        task, first = task.block()
        seeds, requests = task.seeds, self.requests
        samples = one_token_each(seeds)

        class Played(SampleStream):
            def _collect(self, least, refresh):
                versions = {"token_versions": [[0]] * len(seeds)}
                return samples.with_columns(versions), np.arange(len(seeds)) + first

        return Played(requests, task.version)


def actor(rank, ranks):
    class Rank(ActorWorker):
        def __init__(self):
            Worker.__init__(self, WorkerContext("actor", rank, ranks))
            self._seeds, self._engine = SampleSeeds(7), Engine()

        def coordinates(self):
            return RankMesh({"rollout_dp": ranks, "rollout_tp": 1}).coordinates(rank)

        def draw(self, batch, sampling):
            size = ROWS // ranks
            self.rows = np.arange(rank * size, (rank + 1) * size)
            samples = self.generate_sequences(batch.take(self.rows), sampling)
            return samples, self.rows

    return Rank()


def replica(rank, ranks, engine):
    class Rank(GeneratorWorker):
        def __init__(self):
            Worker.__init__(self, WorkerContext("generator", rank, ranks))
            self._seeds, self._generator = SampleSeeds(7), engine
            self._place = RankMesh({"rollout_dp": ranks, "rollout_tp": 1}).coordinates(rank)
            self._version = self._started = 0
            self._peers, self._in_flight, self._neighbours = None, False, False

        def draw(self, batch, sampling):
            self.start_sequences(batch, sampling)
            found = self.take_sequences(0, 1)
            return found.batch, found.rows

    return Rank()


KINDS = {
    "actor": actor,
    "generator": lambda rank, ranks: replica(rank, ranks, SingleTurnGenerator(Engine())),
    "served": lambda rank, ranks: replica(rank, ranks, Player(Engine())),
}


def drawn(workers, sampling=SAMPLING):
    """The seed of each row."""
    groups = np.arange(ROWS) // PER_PROMPT
    batch = Batch.from_columns({"prompt_ids": [[int(g), 5] for g in groups], "group_id": groups})
    found = {}
    for worker in workers:
        samples, rows = worker.draw(batch, sampling)
        tokens = [row.tolist() for row in samples["response_ids"].rows()]
        found |= {int(row): token for row, (token,) in zip(rows, tokens, strict=True)}
    return [found[row] for row in range(ROWS)]


@pytest.mark.parametrize("kind", KINDS)
def test_noise_depends_on_the_step_and_the_sample_and_on_no_rank(kind, monkeypatch):
    monkeypatch.setattr(generator, "report_generation", lambda *_: None)
    alone, two = [KINDS[kind](0, 1)], [KINDS[kind](rank, 2) for rank in range(2)]
    steps = [drawn(alone) for _ in range(3)]
    assert [drawn(two) for _ in range(3)] == steps
    assert len({seed for step in steps for seed in step}) == 3 * ROWS, "no two are alike"


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_a_series_of_its_own_changes_nothing_for_the_others(kind):
    plain, looked_at = [KINDS[kind](0, 1)], [KINDS[kind](0, 1)]
    named = [SamplingSettings(4, series=f"evaluation held_out {step}") for step in range(2)]
    first, second = (drawn(looked_at, one) for one in named)
    assert drawn(looked_at) == drawn(plain) and drawn(looked_at, named[0]) == first
    assert drawn(looked_at) == drawn(plain)
    assert len({*first, *second, *drawn(plain)}) == 3 * ROWS


def test_jobs_of_other_seeds_draw_other_samples(tmp_path):
    seeds = SampleSeeds(1)
    seeds.next(range(2), None)
    seeds.save(tmp_path)
    resumed, other = SampleSeeds(1), SampleSeeds(2)
    resumed.load(tmp_path)
    assert seeds.next(range(2), None) == resumed.next(range(2), None)
    assert not {*SampleSeeds(1).next(range(9), None)} & {*other.next(range(9), None)}
