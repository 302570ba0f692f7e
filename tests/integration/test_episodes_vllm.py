"""Episodes with real engines: tokens, log-probabilities and limits of several turns."""

from __future__ import annotations

import itertools
import json
import os

import pyarrow.parquet as pq
import pytest
import torch
from ranks import run_ranks
from settings import SHORT

TOOL = """
import asyncio
from hybridrl.rollout.rollout_engine import EngineSetup
from hybridrl import Turn

class Tool:
    async def reset(self, row):
        self.turns = 0

    async def step(self, response_text, response_ids):
        self.turns += 1
        await asyncio.sleep(0.002 * (response_ids[0] % 5))
        return Turn("12*", reward=0.5, done=self.turns == 3)
"""
PROMPTS = ["1=", "27=", "3" * 50, "44*" * 20]
COPIES = 40
"""Together more tokens than the engine reads at a time (4096), so that some prompts must wait."""


def write_model(folder):
    from hybridrl.data.character_tokenizer import build_character_tokenizer
    from hybridrl.models.model_loading import make_tiny_model

    tokenizer = build_character_tokenizer()
    make_tiny_model(folder, tokenizer, seed=3, hidden_size=64, layers=2, heads=2, context=96)
    return tokenizer


def check_against_transformers(folder, prompts, samples):
    """Every sampled token was the likeliest and has the log-probability that a model gives it when
    it reads the whole sample at once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    columns = ("response_ids", "response_mask", "rollout_log_probs")
    for prompt, *rows in zip(prompts, *(samples[name].rows() for name in columns), strict=True):
        response, mask, log_probs = rows
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response.tolist()])).logits[0, len(prompt) - 1 :]
        expected = logits.log_softmax(-1)[:-1]
        sampled = mask.bool()
        assert torch.equal(expected.argmax(-1)[sampled], response[sampled])
        found = expected.gather(1, response[:, None])[:, 0]
        assert torch.allclose(found[sampled], log_probs[sampled], atol=1e-4)
        assert not log_probs[~sampled].any()


@pytest.mark.vllm
def test_vllm_plays_episodes(tmp_path):
    """In a process of its own, because vLLM wants a process group."""
    run_ranks(play_with_vllm, tmp_path, 1, tmp_path)


def play_with_vllm(rank, tmp_path):
    from hybridrl.batch.batch import Batch
    from hybridrl.config.schema import RolloutConfig
    from hybridrl.rollout import SamplingSettings
    from hybridrl.rollout.episode_generator import EpisodeGenerator, load_episode_class
    from hybridrl.rollout.rollout_engine import EngineSetup
    from hybridrl.rollout.vllm_engine import VLLMEngine
    from hybridrl.system.shared_memory import remove_shared_memory

    job = f"hybridrl-{os.getpid()}-1"
    folder = tmp_path / "model"
    tokenizer = write_model(folder)
    (tmp_path / "tool.py").write_text(TOOL)
    spec = f"{tmp_path / 'tool.py'}:Tool"
    config = RolloutConfig(
        kv_cache_gib=0.05, stop=["9"], episode=spec, max_turns=5, tool_timeout_s=20.0
    )
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
        ),
        config,
    )
    rollout = EpisodeGenerator(
        engine,
        load_episode_class(spec),
        tokenizer,
        config,
    )
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    batch = Batch.from_columns({"prompt_ids": prompts * COPIES, "prompt": PROMPTS * COPIES})
    try:
        drawn = rollout.generate(batch, SamplingSettings(24, stop=("9",)), seed=1)
        again = rollout.generate(batch, SamplingSettings(24, stop=("9",)), seed=1)
        other = rollout.generate(batch, SamplingSettings(24, stop=("9",)), seed=2)
        greedy = rollout.generate(batch, SamplingSettings(24, 0.0, stop=("9",)), seed=1)
    finally:
        rollout.close()
        remove_shared_memory(job)
    assert drawn["response_ids"].values.tolist() == again["response_ids"].values.tolist()
    assert drawn["response_ids"].values.tolist() != other["response_ids"].values.tolist()
    check_against_transformers(folder, prompts * COPIES, greedy)
    given = tokenizer("12*")["input_ids"]
    for samples in (drawn, other, greedy):
        assert samples.lengths("response_ids").max() <= 24
        for response, mask, turns, reason, rewards in zip(
            samples["response_ids"].rows(),
            samples["response_mask"].rows(),
            samples["turns"].tolist(),
            samples["finish_reason"],
            samples["turn_rewards"].rows(),
            strict=True,
        ):
            runs = [
                (kind, [token for _, token in run])
                for kind, run in itertools.groupby(
                    zip(mask.tolist(), response.tolist(), strict=True), key=lambda pair: pair[0]
                )
            ]
            assert all(run == given for kind, run in runs if not kind)
            assert sum(kind for kind, _ in runs) == turns == len(rewards)
            assert reason in ("stop", "length") and (reason == "length" or turns == 3)
    assert len(set(drawn["turns"].tolist())) > 1


@pytest.mark.more
def test_a_job_learns_from_episodes_alone(command):
    run = command(
        *SHORT,
        "executor=inline",
        "rollout=transformers",
        "data=calculator",
        "data.prompts_per_step=8",
        "warmup.steps=20",
        "observe.samples_every=1",
    )
    assert run.finish() == 0, run.output
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "response/turns" in row]
    assert len(steps) == 2 and all(row["response/turns"] >= 1 for row in steps)
    assert all(row["tools/errors"] == row["tools/timeouts"] == 0 for row in steps)
    assert all(row["mismatch/k3"] < 1e-6 for row in steps)
    samples = pq.read_table(run.directory / "samples" / "step-000001.parquet").to_pylist()
    assert any("<" in row["response"] for row in samples)


def test_a_missing_class_is_a_sentence(refusal):
    said = refusal("executor=inline", "rollout=transformers", "rollout.episode=absent.py:Tool")
    assert "rollout.episode" in said and "absent.py" in said
