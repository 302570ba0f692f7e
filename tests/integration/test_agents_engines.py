"""Programs over HTTP with real engines: what is kept is what the model gives, token by token."""

from __future__ import annotations

import os

import pytest
import torch
from agent_cases import ThreadPrograms
from agent_programs import Conversation, turns_of
from ranks import run_ranks

from hybridrl.config.schema import RolloutConfig
from hybridrl.rollout.rollout_engine import EngineSetup

SAMPLING = {"max_tokens": 24, "temperature": 0.8}


def write_model(folder):
    from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
    from hybridrl.models.model_loading import make_tiny_model

    tokenizer = build_character_tokenizer(PRINTABLE_CHARACTERS, chat=True)
    make_tiny_model(folder, tokenizer, seed=3, hidden_size=64, layers=2, heads=2, context=1024)
    return tokenizer


def play(engine, tokenizer, episodes):
    """Episodes of programs with all quirks, and what the engine gave meanwhile."""
    import httpx

    from hybridrl.batch.batch import Batch
    from hybridrl.config.schema import EnvironmentConfig
    from hybridrl.rollout import SamplingSettings
    from hybridrl.serving.agent_rollout import AgentGenerator
    from hybridrl.serving.endpoint import ReplicaEndpoint
    from hybridrl.serving.renderer_chat import choose_renderer
    from hybridrl.serving.routes import ServedModel

    sampled, poll = [], engine.poll

    def recording():
        found = poll()
        sampled.extend((one.prompt_ids, one.token_ids, one.log_probs) for one in found)
        return found

    engine.poll = recording
    chat = choose_renderer(tokenizer, "tiny")
    endpoint = ReplicaEndpoint(ServedModel("tiny", tokenizer, chat, len(tokenizer), 1024))
    with httpx.Client() as http:
        programs = ThreadPrograms(
            lambda play: Conversation(play, http).run(3), endpoint.exchange.wake
        )
        rollout = AgentGenerator(engine, endpoint, programs, EnvironmentConfig())
        numbers = list(range(episodes))
        rows = Batch.from_columns({"prompt_ids": [torch.tensor([5])] * episodes, "number": numbers})
        try:
            batch = rollout.generate(rows, SamplingSettings(**SAMPLING), seed=1)
            assert not engine.progress()
        finally:
            endpoint.close()
    assert batch["finish_reason"].count("error") == 0
    assert batch["episode_rewards"].sum() == batch["turns"].sum()
    return turns_of(batch), sampled


def check(folder, turns, sampled):
    """All turns were sampled by the engine, and their log-probabilities are those that the model
    gives when it reads a conversation at once."""
    from transformers import AutoModelForCausalLM

    found = [(p, t, torch.tensor(x)) for p, t, x in sampled]
    model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, tokens, log_probs in turns:
        log_probs = torch.tensor(log_probs)
        assert any((p, t) == (prompt, tokens) and torch.equal(x, log_probs) for p, t, x in found)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / SAMPLING["temperature"]).log_softmax(-1)
        expected = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(expected, log_probs, atol=1e-4)


def test_with_transformers(tmp_path):
    from hybridrl.rollout.transformers_engine import TransformersEngine

    tokenizer = write_model(tmp_path)
    engine = TransformersEngine(
        EngineSetup(
            str(tmp_path),
            str(tmp_path),
            "float32",
            eos_token_ids=[tokenizer.eos_token_id],
            device=torch.device("cpu"),
        ),
        RolloutConfig(max_sequences=16),
    )
    turns, sampled = play(engine, tokenizer, 8)
    check(tmp_path, turns, sampled)


@pytest.mark.more
@pytest.mark.vllm
def test_with_vllm(tmp_path):
    """In a process of its own, because vLLM wants a process group."""
    run_ranks(play_with_vllm, tmp_path, 1, tmp_path)


def play_with_vllm(rank, tmp_path):
    from hybridrl.rollout.vllm_engine import VLLMEngine
    from hybridrl.system.shared_memory import remove_shared_memory

    job, folder = f"hybridrl-{os.getpid()}-1", tmp_path / "model"
    tokenizer = write_model(folder)
    engine = VLLMEngine(
        EngineSetup(
            str(folder),
            str(folder),
            "float32",
            context_length=1024,
            eos_token_ids=[tokenizer.eos_token_id],
            device=torch.device("cpu"),
            seed=0,
            job=job,
            stop_texts=True,
        ),
        RolloutConfig(kv_cache_gib=0.1),
    )
    try:
        turns, sampled = play(engine, tokenizer, 16)
        check(folder, turns, sampled)
    finally:
        engine.close()
        remove_shared_memory(job)
