"""Requests to vLLM one by one: dropped while they run, seen as they grow, ended by their texts."""

from __future__ import annotations

import os

import pytest
import torch
from ranks import run_ranks

from hybridrl.rollout.rollout_engine import EngineSetup


@pytest.mark.vllm
def test_requests_are_dropped_seen_and_ended(tmp_path):
    """In a process of its own, because vLLM wants a process group."""
    run_ranks(make_requests, tmp_path, 1, tmp_path)


def make_requests(rank, tmp_path):
    from hybridrl.config.schema import RolloutConfig
    from hybridrl.data.character_tokenizer import build_character_tokenizer
    from hybridrl.models.model_loading import make_tiny_model
    from hybridrl.rollout.rollout_engine import Request, SamplingSettings
    from hybridrl.rollout.vllm_engine import VLLMEngine
    from hybridrl.system.shared_memory import remove_shared_memory

    job, folder = f"hybridrl-{os.getpid()}-1", tmp_path / "model"
    tokenizer = build_character_tokenizer()
    make_tiny_model(folder, tokenizer, seed=3, hidden_size=64, layers=2, heads=2, context=96)
    engine = VLLMEngine(
        EngineSetup(
            str(folder),
            str(folder),
            "float32",
            context_length=96,
            eos_token_ids=[tokenizer.eos_token_id],
            device=torch.device("cpu"),
            seed=0,
            job=job,
            stop_texts=True,
        ),
        RolloutConfig(kv_cache_gib=0.05),
    )
    prompt = tokenizer("12*")["input_ids"]
    long = SamplingSettings(24, min_tokens=24)  # all end at the same time

    def outcomes(dropped=()):
        engine.start(Request(0, prompt, long, seed=5, samples=3))
        engine.start(Request(3, prompt, long, seed=8, samples=2))
        engine.start(Request(5, prompt, long, seed=10))
        found, seen = {}, {}
        for _ in range(40):
            found |= {finished.key: finished for finished in engine.poll()}
            if len(found) == 6 - len(dropped):
                break
            for key, tokens in engine.partial().items():
                assert tokens[: len(seen.get(key, []))] == seen.get(key, [])
                seen[key] = tokens
            if seen and min(map(len, seen.values())) >= 4:
                engine.abort(dropped)
        return found, seen

    try:
        whole, seen = outcomes()
        assert sorted(whole) == sorted(seen) == [0, 1, 2, 3, 4, 5]
        for key, tokens in seen.items():
            assert len(tokens) >= 4 and tokens == whole[key].token_ids[: len(tokens)]
        left, _ = outcomes(dropped=(1, 3, 4))  # one of three samples, and all of the next two
        assert {key: f.token_ids for key, f in left.items()} == {
            key: whole[key].token_ids for key in (0, 2, 5)
        }
        assert not engine.progress() and not engine.poll()

        stops = whole[5].token_ids[6]
        at = whole[5].token_ids.index(stops)
        text = tokenizer.decode([stops])
        engine.start(Request(0, prompt, SamplingSettings(24, stop_token_ids=(stops,)), seed=10))
        engine.start(Request(1, prompt, SamplingSettings(24, stop=(text,)), seed=10))
        found = []
        while len(found) < 2:
            found += engine.poll()
        for finished in found:
            assert finished.token_ids == whole[5].token_ids[: at + 1]
            assert finished.finish_reason == "stop"
    finally:
        engine.close()
        remove_shared_memory(job)
