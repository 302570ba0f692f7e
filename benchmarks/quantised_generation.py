"""Generation in 8 bits: what it gains, how far it is from the model that is trained, and whether
what is learned from its samples is the same.

    python benchmarks/quantised_generation.py [--rounds 5] [--seeds 0 1 2]

Engines of vLLM with one model of 34 million parameters take turns: `rollout.quantization=int8`,
bfloat16 and float32. Each says what it thought of the tokens that it drew; the model in float32
says what it thinks of them, which gives the KL divergence a token. Then the built-in task is
learned by GRPO with and without int8, a process for each seed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from figures import report
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybridrl.algorithms import estimate_kl
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import RolloutConfig
from hybridrl.controller.worker import WorkerContext
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.parallel.process_group import join_group_world
from hybridrl.rollout import SamplingSettings
from hybridrl.rollout.rollout_engine import EngineSetup
from hybridrl.system.shared_memory import remove_shared_memory

CONFIG = Qwen2Config(
    vocab_size=4096,
    hidden_size=768,
    intermediate_size=2560,
    num_hidden_layers=4,
    num_attention_heads=12,
    num_key_value_heads=4,
    max_position_embeddings=256,
    initializer_range=0.06,  # so that some tokens are likelier than others
    tie_word_embeddings=True,
    eos_token_id=1,
    pad_token_id=0,
)
ARMS = {
    "int8": ("int8", "bfloat16"),
    "bfloat16": ("none", "bfloat16"),
    "float32": ("none", "float32"),
}
"""`rollout.quantization` and `model.dtype` of each."""
PROMPTS, PROMPT_TOKENS, TOKENS = 48, 16, 32
JOB = "hybridrl-benchmark"
TASK = ("executor=inline", "data.prompts_per_step=64", "trainer.steps=80", "eval.prompts=400")
BUDGET = 0.01
"""Nats a token."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    options = parser.parse_args()
    if options.rounds:
        measure_generation(options.rounds)
    if options.seeds:
        measure_learning(options.seeds)


def measure_generation(rounds: int) -> None:
    """Tokens a second of the engines in turn, and the divergence of each from the whole model."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(CONFIG).eval()
        model.save_pretrained(folder)
        build_character_tokenizer().save_pretrained(folder)
        join_group_world(WorkerContext("benchmark", 0, 1))
        engines = {name: make_engine(folder, *arm) for name, arm in ARMS.items()}
        ids = torch.randint(2, CONFIG.vocab_size, (PROMPTS, PROMPT_TOKENS))
        batch = Batch.from_columns({"prompt_ids": [row.tolist() for row in ids]})
        samples = {name: draw(engine, batch)[0] for name, engine in engines.items()}  # and warm up
        seconds = [{name: draw(engine, batch)[1] for name, engine in engines.items()}]
        for number in range(rounds - 1):
            print(f"# round {number + 1} of {rounds - 1}")
            seconds.append({name: draw(engine, batch)[1] for name, engine in engines.items()})
        speed = {
            name: PROMPTS * TOKENS / statistics.median(times[name] for times in seconds)
            for name in ARMS
        }
        for name in ("bfloat16", "float32"):
            report(f"int8 against {name}: speed", speed["int8"], speed[name], "> 1", "tokens/s")
        for name, drawn in samples.items():
            report(f"{name}: KL", divergence(model, drawn, ids), BUDGET, "<= 1", "nats/token")
        for engine in engines.values():
            engine.close()
    remove_shared_memory(JOB)


def make_engine(folder: str, quantization: str, dtype: str) -> Any:
    from hybridrl.rollout.vllm_engine import VLLMEngine

    return VLLMEngine(
        EngineSetup(
            folder,
            folder,
            dtype,
            context_length=PROMPT_TOKENS + TOKENS,
            eos_token_ids=[1],
            device=torch.device("cpu"),
            seed=0,
            job=JOB,
        ),
        RolloutConfig(quantization=quantization, kv_cache_gib=0.1),
    )


def draw(engine: Any, batch: Batch) -> tuple[Batch, float]:
    """Samples of one length, and how long they took."""
    began = time.perf_counter()
    samples = engine.generate(batch, SamplingSettings(max_tokens=TOKENS, min_tokens=TOKENS), seed=1)
    return samples, time.perf_counter() - began


@torch.no_grad()
def divergence(model: Qwen2ForCausalLM, samples: Batch, prompts: torch.Tensor) -> float:
    """KL of an engine from the model, by the tokens that the engine drew (k3)."""
    responses = torch.stack(list(samples["response_ids"].rows())).long()
    logits = model(torch.cat([prompts, responses], 1)).logits[:, PROMPT_TOKENS - 1 : -1].float()
    logits[..., 1] = -torch.inf  # the end, which was forbidden
    thought = logits.log_softmax(-1).gather(-1, responses[..., None])[..., 0]
    said = torch.stack(list(samples["rollout_log_probs"].rows()))
    return estimate_kl(said, thought, "k3").mean().item()


def measure_learning(seeds: list[int]) -> None:
    """The built-in task on one device, with two thirds of the steps of `make train`."""
    found: dict[str, list[tuple[float, float]]] = {"int8": [], "none": []}
    for seed in seeds:
        for quantization, runs in found.items():
            runs.append(learn(quantization, seed))
        accuracies = (runs[-1][0] for runs in found.values())
        report(f"seed {seed}: accuracy", *accuracies, "report", "share")
    means = [statistics.mean(accuracy for accuracy, _ in runs) for runs in found.values()]
    report("int8: accuracy, mean of the seeds", *means, "within 0.03", "share")
    largest = max(divergence for _, divergence in found["int8"])
    report("int8: KL while learning", largest, BUDGET, "<= 1", "nats/token")


def learn(quantization: str, seed: int) -> tuple[float, float]:
    """Accuracy at the end, and the mean KL (k3) of generator and trainer."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = [f"run.directory={run}", f"run.seed={seed}"]
        command = [sys.executable, "-m", "hybridrl.main", *TASK, *settings]
        command.append(f"rollout.quantization={quantization}")
        subprocess.run(command, check=True, capture_output=True, env=dict(os.environ))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accuracy = [line["accuracy"] for line in lines if "accuracy" in line][-1]
    return accuracy, statistics.mean(x["mismatch/k3"] for x in lines if "mismatch/k3" in x)


if __name__ == "__main__":
    main()
