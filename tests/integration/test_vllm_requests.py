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

        half = tuple(range(2, 25))  # of the tokens end a sample
        engine.start(Request(0, prompt, SamplingSettings(24, stop_token_ids=half), 1, samples=6))
        polls = [[one.key for one in engine.poll()] for _ in range(25)]
        assert sorted(key for poll in polls for key in poll) == list(range(6))
        assert len(list(filter(None, polls))) > 1, "each sample is given when it ends"

        engine.start(Request(0, prompt, SamplingSettings(8, temperature=0), 1, samples=3))
        engine.abort([1])
        alike = [one for _ in range(10) for one in engine.poll()]
        assert [one.key for one in alike] == [0, 2] and alike[0].token_ids == alike[1].token_ids
    finally:
        engine.close()
        remove_shared_memory(job)


@pytest.mark.vllm
def test_a_prefix_in_the_cache_changes_no_sample_and_is_counted(tmp_path):
    from hybridrl.data.character_tokenizer import build_character_tokenizer
    from hybridrl.models.model_loading import make_tiny_model

    make_tiny_model(
        *(tmp_path / "model", build_character_tokenizer()),
        **{"seed": 3, "hidden_size": 64, "layers": 2, "heads": 2, "context": 160},
    )
    ((without, nothing),) = run_ranks(sample_alike, tmp_path, 1, tmp_path / "model", {})
    options = {"enable_prefix_caching": True, "block_size": 32}
    ((samples, counts),) = run_ranks(sample_alike, tmp_path, 1, tmp_path / "model", options)
    assert samples == without and nothing == [{}, {}]
    # Five prompts of 70 tokens, two samples of each; the first sample finds nothing, whether or not
    # a prompt was there before the weights were new.
    expected = {"prompt_tokens": 10 * 70, "cached_tokens": 9 * 64}
    assert counts == [expected, expected]


def sample_alike(rank, folder, options):
    """Samples of prompts that begin alike, twice, with new weights in between."""
    from safetensors.torch import load_file

    from hybridrl.batch.batch import Batch
    from hybridrl.config.schema import RolloutConfig
    from hybridrl.rollout.rollout_engine import SamplingSettings
    from hybridrl.rollout.vllm_engine import VLLMEngine
    from hybridrl.system.shared_memory import remove_shared_memory

    job = f"hybridrl-{os.getpid()}-1"
    setup = {"context_length": 96, "eos_token_ids": [1], "device": torch.device("cpu"), "job": job}
    engine = VLLMEngine(
        EngineSetup(*(str(folder), str(folder), "float32"), **setup),
        RolloutConfig(kv_cache_gib=0.05, engine_options=options),
    )
    prompts = [[2 + place % 7 for place in range(66)] + [3 + row] * 4 for row in range(5)]
    batch = Batch.from_columns({"prompt_ids": [ids for ids in prompts for _ in range(2)]})
    try:
        found, counts = [], []
        for _ in range(2):
            engine.load(iter(load_file(folder / "model.safetensors").items()))
            made = engine.generate(batch, SamplingSettings(8, min_tokens=8), seed=4)
            found.append([row.tolist() for row in made["response_ids"].rows()])
            counts.append(engine.counts())
        return found, counts
    finally:
        engine.close()
        remove_shared_memory(job)


@pytest.mark.vllm
def test_a_token_under_way_changes_no_sample(tmp_path):
    """With asynchronous scheduling vLLM plans a step while the one before runs. It has none on
    CPUs, so that its switch and the streams of a GPU are put in their places here."""
    from hybridrl.data.character_tokenizer import build_character_tokenizer
    from hybridrl.models.model_loading import make_tiny_model

    folder = tmp_path / "model"
    make_tiny_model(
        folder, build_character_tokenizer(), seed=3, hidden_size=64, layers=2, heads=2, context=96
    )
    (waits,) = run_ranks(sample_twice, tmp_path, 1, folder, False)
    (ahead,) = run_ranks(sample_twice, tmp_path, 1, folder, True)
    assert (waits["queue"], ahead["queue"]) == (1, 2)
    assert waits["samples"] == ahead["samples"]


def sample_twice(rank, folder, is_ahead):
    """Ten samples, two of them dropped while they run, with more than may run at a time; and then
    ten more, while a step for the first ones is still in the queue. Then six that are interrupted,
    which have the beginnings of what they are when they are made again."""
    from unittest.mock import MagicMock

    from vllm.platforms.cpu import CpuPlatform

    from hybridrl.config.schema import RolloutConfig
    from hybridrl.data.character_tokenizer import build_character_tokenizer
    from hybridrl.rollout.rollout_engine import Request, SamplingSettings
    from hybridrl.rollout.vllm_engine import VLLMEngine
    from hybridrl.system.shared_memory import remove_shared_memory

    check = CpuPlatform.check_and_update_config
    for name in ("Event", "Stream", "stream", "current_stream"):
        setattr(torch.cuda, name, MagicMock())

    def switched(config):
        check(config)
        config.scheduler_config.async_scheduling = is_ahead

    CpuPlatform.check_and_update_config = staticmethod(switched)
    job, tokenizer = f"hybridrl-{os.getpid()}-1", build_character_tokenizer()
    engine = VLLMEngine(
        EngineSetup(
            *(str(folder), str(folder), "float32"),
            context_length=96,
            eos_token_ids=[tokenizer.eos_token_id],
            device=torch.device("cpu"),
            job=job,
        ),
        RolloutConfig(kv_cache_gib=0.05, max_sequences=4),
    )
    try:
        found = {}
        for first in (0, 10):
            for key in range(first, first + 10, 2):
                prompt = tokenizer(f"{key}*3=")["input_ids"]
                engine.start(Request(key, prompt, SamplingSettings(8 + key), key, samples=2))
            for polls in range(200):
                found |= {one.key: (one.token_ids, one.log_probs) for one in engine.poll()}
                if polls == 3:
                    engine.abort([first, first + 1])
                if len(found) == 8 * (first // 10 + 1):
                    break
        again = [
            Request(key, tokenizer("7*3=")["input_ids"], SamplingSettings(12, min_tokens=12), key)
            for key in range(20, 26)
        ]
        for request in again:
            engine.start(request)
        for _ in range(5):
            assert not engine.poll()
        cut = {one.key: one for one in engine.interrupt()}
        assert not engine.progress() and not engine.interrupt()
        for request in again:
            engine.start(request)
        while len(found) < 16 + 6:
            found |= {one.key: (one.token_ids, one.log_probs) for one in engine.poll()}
        for key, one in cut.items():
            tokens, log_probs = found[key]
            assert one.finish_reason == "unfinished" and one.prompt_ids == again[0].prompt_ids
            assert one.token_ids == tokens[: len(one.token_ids)]
            assert one.log_probs == log_probs[: len(one.token_ids)]
        assert sorted(len(one.token_ids) > 2 for one in cut.values()) == [False] * 2 + [True] * 4
        queue = engine._llm.llm_engine.engine_core.engine_core.batch_queue_size
        return {"samples": found, "queue": queue}
    finally:
        engine.close()
        remove_shared_memory(job)


@pytest.mark.vllm
def test_what_a_gpu_s_engine_is_started_with(tmp_path):
    (found,) = run_ranks(started_with, tmp_path, 1, tmp_path / "model")
    ahead, in_flight = found
    assert ahead["async_scheduling"] is None  # vLLM's own choice, which is to schedule ahead
    assert in_flight["async_scheduling"] is False
    assert [one["kv_cache_dtype"] for one in found] == ["auto", "fp8"]
    assert [one["gpu_memory_utilization"] for one in found] == [0.85, 0.85]


def started_with(rank, folder):
    """The options that vLLM is given, by whether weights change in flight."""
    from unittest.mock import patch

    from hybridrl.config.schema import RolloutConfig
    from hybridrl.data.character_tokenizer import build_character_tokenizer
    from hybridrl.models.model_loading import make_tiny_model
    from hybridrl.rollout.vllm_startup import start_vllm
    from hybridrl.system.shared_memory import remove_shared_memory

    make_tiny_model(
        folder, build_character_tokenizer(), seed=0, hidden_size=64, layers=1, heads=2, context=96
    )
    found, job = [], f"hybridrl-{os.getpid()}-1"
    for changes, cache in ((False, "auto"), (True, "fp8")):
        setup = EngineSetup(
            *(str(folder), str(folder), "bfloat16"),
            eos_token_ids=[0],
            device=torch.device("cuda"),
            job=job,
            changes_in_flight=changes,
        )
        config = RolloutConfig(memory_share=0.85, kv_cache=cache)
        with patch("hybridrl.rollout.vllm_startup.LLM") as llm:
            start_vllm(setup, config, {})
        found.append(llm.call_args.kwargs)
    remove_shared_memory(job)
    return found
