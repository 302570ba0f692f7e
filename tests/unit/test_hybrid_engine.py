"""HybridEngine: the generation form has the newest weights whenever it generates."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from hybridrl.batch.batch import Batch
from hybridrl.engine.hybrid_engine import HybridEngine
from hybridrl.rollout.rollout_engine import (
    BatchedEngine,
    EngineOutput,
    SamplingSettings,
    build_response_batch,
)
from hybridrl.rollout.sample_generator import SingleTurnGenerator
from hybridrl.workers.actor_worker import ActorWorker

PROMPTS = Batch.from_columns({"prompt_ids": [[1], [2]]})


class Rollout(BatchedEngine):
    def __init__(self, keeps, mask=None, awaits=False):
        super().__init__()
        self.keeps, self.mask, self.awaits = keeps, mask, awaits
        self.weights = {"w": 99 if awaits else 0}

    keeps_weights = property(lambda self: self.keeps)
    awaits_weights = property(lambda self: self.awaits)

    def generate(self, batch, sampling, seed):
        token = self.weights["w"]
        samples = build_response_batch([EngineOutput(0, [], [token, 7], [-1.0, -1.0], "stop")] * 2)
        return samples if self.mask is None else samples.with_columns({"response_mask": self.mask})

    def load(self, weights):
        self.weights = dict(weights)

    def sleep(self):
        if not self.keeps:
            self.weights = {"w": 99}


def engine(rollout):
    mesh = SimpleNamespace(group=lambda: None)
    train = SimpleNamespace(
        begins_with_adapters=False,
        differs_from_folder=False,
        device=torch.device("cpu"),
        mesh=mesh,
        has_adapters=True,
        version=0,
    )
    train.offload = lambda: None
    train.weights_for = lambda adapters: iter([("w", train.version)])

    def update(batch, loss, **options):
        train.version += 1
        return {}

    train.update = update
    return HybridEngine(train, SingleTurnGenerator(rollout), lambda name: nullcontext())


def test_an_engine_without_weights_gets_them_before_it_generates():
    rollout = Rollout(keeps=True, awaits=True)
    samples = engine(rollout).generate(PROMPTS, SamplingSettings(2), seeds=[0, 1])
    assert samples["response_ids"].values.tolist() == [0, 7] * 2


def test_an_engine_gives_its_memory_to_the_roles_that_are_built_after_it():
    rollout = Rollout(keeps=False)
    engine(rollout)
    assert rollout.weights == {"w": 99}, "it sleeps"


@pytest.mark.parametrize("keeps", [True, False])
def test_weights_are_the_newest_also_after_sleep(keeps):
    hybrid = engine(Rollout(keeps))
    for version in range(3):
        for _ in range(2):  # an evaluation between two updates, for instance
            samples = hybrid.generate(PROMPTS, SamplingSettings(2), seeds=[0, 1])
            assert samples["response_ids"].values.tolist() == [version, 7] * 2
            assert samples["policy_version"].tolist() == [version] * 2
        hybrid.update(PROMPTS, None)


def test_training_weights_stay_away_while_samples_are_under_way():
    hybrid, worker = engine(Rollout(keeps=True)), ActorWorker.__new__(ActorWorker)
    worker._engine, worker.model_engine = hybrid, hybrid.train
    worker.context = SimpleNamespace(role="actor")
    onloaded = []
    hybrid.train.onload = lambda: onloaded.append(hybrid.is_generating)
    worker.enter()
    hybrid.begin(PROMPTS, SamplingSettings(2), seeds=[0, 1])
    worker.enter()
    hybrid.take(1, last=True)
    worker.enter()
    assert onloaded == [False, False]


def test_loaded_weights_are_a_new_version_that_generates():
    hybrid = engine(Rollout(keeps=True))
    hybrid.train.load = lambda folder: setattr(hybrid.train, "version", 41)
    hybrid.generate(PROMPTS, SamplingSettings(2), seeds=[0, 1])
    hybrid.load("folder")
    samples = hybrid.generate(PROMPTS, SamplingSettings(2), seeds=[0, 1])
    assert samples["response_ids"].values.tolist() == [41, 7] * 2
    assert samples["policy_version"].tolist() == [1, 1]


def test_all_tokens_were_sampled_unless_the_engine_says_otherwise():
    samples = engine(Rollout(True)).generate(PROMPTS, SamplingSettings(2), seeds=[0, 1])
    assert samples["response_mask"].values.tolist() == [1] * 4
    mask = [[1, 0], [0, 1]]
    samples = engine(Rollout(True, mask)).generate(PROMPTS, SamplingSettings(2), seeds=[0, 1])
    assert samples["response_mask"].values.tolist() == [1, 0, 0, 1]
