"""Prompts that share prefixes: what an order that brings them together spares the generator.

    python benchmarks/prefix_order.py [--rounds 5] [--samples 1]

`SYSTEMS` system prompts, each with `DOCUMENTS` documents of various lengths and `QUESTIONS`
questions on each, in steps of `PROMPTS`. Steps of `data.order=prefix` and of `random` take turns on
one engine of vLLM, which gets its weights anew before each step, as in training, so that nothing of
an earlier step is in its cache. All samples of a prompt but the first find the prompt in the cache
in either order; `--samples` shows what is left of the difference then.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import SMOKE, report
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import RolloutConfig
from hybridrl.controller.worker import WorkerContext
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.prefix_order import BLOCK_TOKENS, PrefixOrder, cut_steps
from hybridrl.parallel.process_group import join_group_world
from hybridrl.rollout import SamplingSettings
from hybridrl.rollout.rollout_engine import EngineSetup
from hybridrl.system.shared_memory import remove_shared_memory

CONFIG = Qwen2Config(
    vocab_size=1024,
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    eos_token_id=1,
    pad_token_id=0,
)
SYSTEMS, DOCUMENTS, QUESTIONS = (8, 2, 4) if SMOKE else (40, 6, 8)
SYSTEM_TOKENS, DOCUMENT_TOKENS, QUESTION_TOKENS = (32, 96), (128, 384), (8, 32)
"""Shortest and longest."""
PROMPTS, TOKENS = (16, 4) if SMOKE else (64, 32)
MAX_ERROR = 0.05
JOB = "hybridrl-benchmark"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1)
    options = parser.parse_args()
    prompts = make_prompts(np.random.default_rng(0))
    order, random = PrefixOrder(prompts, PROMPTS, MAX_ERROR, seed=0), np.random.default_rng(1)
    epochs = {"prefix": order.rows(random), "random": random.permutation(len(prompts))}
    steps = {arm: cut_steps(rows, PROMPTS) for arm, rows in epochs.items()}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen2ForCausalLM(CONFIG).save_pretrained(folder)
        build_character_tokenizer().save_pretrained(folder)
        join_group_world(WorkerContext("benchmark", 0, 1))
        engine = make_engine(folder)
        for arm in steps:
            generate(engine, folder, prompts.take(steps[arm][-1]), options.samples)  # warm up
        found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in steps}
        for number in range(1 if SMOKE else options.rounds):
            for arm, rows in steps.items():
                batch = prompts.take(rows[number])
                found[arm].append(generate(engine, folder, batch, options.samples))
            print(f"# round {number + 1}: {' and '.join(f'{found[arm][-1]}' for arm in steps)}")
        engine.close()
    remove_shared_memory(JOB)
    (hits, ours), (hits_of_random, theirs) = (
        map(statistics.median, zip(*found[arm], strict=True)) for arm in steps
    )
    report("prefix hits", hits, hits_of_random, ">= 3", "share of the tokens of prompts")
    report("generation", ours, theirs, ">= 1.2", "tokens/s")
    error = order.error(steps["prefix"])
    report("shuffling error", error, MAX_ERROR, "<= 1", "total variation distance")
    report("rows of a branch", order.branch, 1, "report", "rows")


def make_prompts(random: np.random.Generator) -> Batch:
    """The rows of the set, in random order."""

    def tokens(shortest: int, longest: int) -> Any:
        return random.integers(2, CONFIG.vocab_size, random.integers(shortest, longest + 1))

    rows = [
        np.concatenate([system, document, tokens(*QUESTION_TOKENS)])
        for system in (tokens(*SYSTEM_TOKENS) for _ in range(SYSTEMS))
        for document in (tokens(*DOCUMENT_TOKENS) for _ in range(DOCUMENTS))
        for _ in range(QUESTIONS)
    ]
    return Batch.from_columns({"prompt_ids": [rows[n] for n in random.permutation(len(rows))]})


def make_engine(folder: str) -> Any:
    """An engine with the options that a job with the prefix order gives it."""
    from hybridrl.rollout.vllm_engine import VLLMEngine

    return VLLMEngine(
        EngineSetup(
            folder,
            folder,
            "float32",
            context_length=sum(n for _, n in (SYSTEM_TOKENS, DOCUMENT_TOKENS, QUESTION_TOKENS))
            + TOKENS,
            eos_token_ids=[1],
            device=torch.device("cpu"),
            seed=0,
            job=JOB,
        ),
        RolloutConfig(
            kv_cache_gib=0.5,
            engine_options={"enable_prefix_caching": True, "block_size": BLOCK_TOKENS},
        ),
    )


def weights_of(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    yield from load_file(Path(folder) / "model.safetensors").items()


def generate(engine: Any, folder: str, prompts: Batch, samples: int) -> tuple[float, float]:
    """The share of the prompts' tokens that a step finds in the cache, and its tokens a second."""
    engine.load(weights_of(folder))
    engine.counts()
    batch = prompts.take(np.repeat(np.arange(len(prompts)), samples))
    began = time.perf_counter()
    engine.generate(batch, SamplingSettings(max_tokens=TOKENS, min_tokens=TOKENS), seed=1)
    seconds, counts = time.perf_counter() - began, engine.counts()
    return counts["cached_tokens"] / counts["prompt_tokens"], len(batch) * TOKENS / seconds


if __name__ == "__main__":
    main()
