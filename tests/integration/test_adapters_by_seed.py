"""Adapters begin with the same values however many ranks there are, and however they are cut."""

import pytest
import torch
from ranks import run_ranks

from hybridrl.config.schema import ActorConfig, LoraAdapterConfig, ParallelConfig
from hybridrl.controller import WorkerContext
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.models.model_loading import make_tiny_model

pytestmark = pytest.mark.more

pytest.importorskip("peft", reason="adapters need peft: pip install peft")

CUTS = {
    1: [ParallelConfig()],
    2: [ParallelConfig(), ParallelConfig(ring=2)],
    4: [ParallelConfig(), ParallelConfig(shards=2), ParallelConfig(ulysses=2)],
}


def program(rank, world, folder):
    from hybridrl.workers.training_engines import (
        ModelSource,
        build_policy_engine,
        build_scalar_engine,
    )

    found = []
    for cut in CUTS[world]:
        context = WorkerContext("actor", rank, world)
        config = ActorConfig(parallel=cut, lora=LoraAdapterConfig(rank=2))
        source = ModelSource(str(folder), str(folder), "float32", 64, (), seed=5)
        for build in (build_policy_engine, lambda *given: build_scalar_engine(*given, "before")):
            torch.manual_seed(100 * world + rank)  # whatever a rank has drawn before
            weights = build(context, source, config).full_parameters()
            found.append({name: whole.clone() for name, whole in weights if ".lora_" in name})
    return found


def test_the_same_seed_gives_the_same_adapters(tmp_path):
    shape = {"hidden_size": 64, "layers": 1, "heads": 2, "context": 64}
    folder = make_tiny_model(tmp_path / "model", build_character_tokenizer(), seed=0, **shape)
    policy, critic = run_ranks(program, tmp_path, 1, 1, folder)[0]
    assert any(value.any() for value in policy.values())
    for world in (2, 4):
        for found in run_ranks(program, tmp_path, world, world, folder):
            for number, adapters in enumerate(found):
                wanted = critic if number % 2 else policy
                assert adapters.keys() == wanted.keys()
                assert all(torch.equal(adapters[name], wanted[name]) for name in wanted)
