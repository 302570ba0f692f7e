"""Requests to an engine that generates what waits as one batch: how they end, and dropped ones."""

import pytest
import torch

from hybridrl.config.schema import RolloutConfig
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.rollout.rollout_engine import EngineSetup, Request, SamplingSettings
from hybridrl.rollout.transformers_engine import TransformersEngine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    tokenizer = build_character_tokenizer()
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, tokenizer, seed=3, hidden_size=32, layers=1, heads=2, context=64)
    ends = [tokenizer.eos_token_id]
    return TransformersEngine(
        EngineSetup(
            str(folder), str(folder), "float32", eos_token_ids=ends, device=torch.device("cpu")
        ),
        RolloutConfig(max_sequences=8),
    )


def test_a_token_of_the_request_ends_it_and_stays(engine):
    engine.start(Request(0, [5, 6, 7], SamplingSettings(12), seed=1))
    (whole,) = engine.poll()
    stops = whole.token_ids[4]
    engine.start(Request(0, [5, 6, 7], SamplingSettings(12, stop_token_ids=(stops,)), seed=1))
    (cut,) = engine.poll()
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stops) + 1]
    assert cut.finish_reason == "stop"
    engine.start(
        Request(0, [5, 6], SamplingSettings(12, stop_token_ids=(stops,), min_tokens=12), seed=1)
    )
    assert stops not in engine.poll()[0].token_ids[:-1], "it is not chosen before `min_tokens`"


def test_a_dropped_sample_is_not_generated(engine):
    engine.start(Request(0, [5, 6], SamplingSettings(3), seed=1, samples=3))
    engine.start(Request(3, [5, 6], SamplingSettings(3), seed=9))
    engine.abort([1, 3, 77])
    assert [finished.key for finished in engine.poll()] == [0, 2]
