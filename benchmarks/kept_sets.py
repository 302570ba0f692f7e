"""Sampling from the likeliest tokens only: how far the trainer's log-probabilities are from the
generator's, and whether a policy learns as well.

    python benchmarks/kept_sets.py [--seeds 0 1 2]

vLLM samples from a model with 151,936 tokens, in bfloat16, from all of them and with top_p=0.8 and
top_k=20. The training engine then computes the log-probabilities of what was sampled, in float32:
over the tokens that were kept, as it does in a job, and over all of them. Ratios of the two are to
have a mean of 1. Then the built-in task is learned by GRPO with and without top_p and top_k, a
process for each run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from figures import SMOKE, report
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hybridrl.algorithms import estimate_kl
from hybridrl.batch.batch import Batch
from hybridrl.batch.kept_sets import KEPT_SETS
from hybridrl.config.schema import ActorConfig, RolloutConfig
from hybridrl.controller.worker import WorkerContext
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.parallel.process_group import ParallelMesh, join_group_world
from hybridrl.rollout import SamplingSettings
from hybridrl.rollout.rollout_engine import EngineSetup
from hybridrl.system.shared_memory import remove_shared_memory

CONFIG = Qwen2Config(
    vocab_size=2048 if SMOKE else 151_936,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    eos_token_id=1,
    pad_token_id=0,
)
PEAK = 50
"""What the weights of the head are multiplied by, so that some tokens are likelier than others."""
PROMPTS, PROMPT_TOKENS, TOKENS = (4, 8, 8) if SMOKE else (64, 16, 64)
KEPT = {"top_p": 0.8, "top_k": 20}
JOB = "hybridrl-benchmark"
CPU = torch.device("cpu")
TASK = ("executor=inline", "data.prompts_per_step=64", "trainer.steps=80", "eval.prompts=400")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    options = parser.parse_args()
    measure_ratios()
    if options.seeds:
        measure_learning(options.seeds)


def measure_ratios() -> None:
    """Sample by vLLM with all tokens and with some, and compare with the training engine."""
    from hybridrl.rollout.vllm_engine import VLLMEngine

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(CONFIG)
        model.lm_head.weight.data.mul_(PEAK)
        model.save_pretrained(folder)
        build_character_tokenizer().save_pretrained(folder)
        join_group_world(WorkerContext("benchmark", 0, 1))
        length = PROMPT_TOKENS + TOKENS
        setup = EngineSetup(folder, folder, "bfloat16", [1], CPU, context_length=length, job=JOB)
        generator = VLLMEngine(setup, RolloutConfig(kv_cache_gib=0.1, **KEPT))
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=PACKED_ATTENTION)
        mesh = ParallelMesh(RankMesh({"dp": 1}), CPU)
        trainer = TrainEngine(CausalPolicy(model), mesh, "float32", ActorConfig())
        ids = torch.randint(2, CONFIG.vocab_size, (PROMPTS, PROMPT_TOKENS))
        prompts = Batch.from_columns({"prompt_ids": [row.tolist() for row in ids]})
        divergence = {}
        for name, further in {"plain": {}, "kept": KEPT}.items():
            sampling = SamplingSettings(max_tokens=TOKENS, **further)
            samples = prompts | generator.generate(prompts, sampling, seed=1)
            said = samples.ragged("rollout_log_probs").values
            found = compute_log_probs(trainer, samples)
            divergence[name] = estimate_kl(said, found, "k3").mean().item()
            report(f"{name}: mean ratio", mean_ratio(found, said), 1.0, "1 +- 0.003", "ratio")
            print(f"# {name}: {len(said)} tokens, {-said.mean().item():.2f} nats each", flush=True)
        columns = [name for name in samples.columns if name != KEPT_SETS]
        found = compute_log_probs(trainer, samples.select(columns))
        report("over all tokens: mean ratio", mean_ratio(found, said), 1.0, "report", "ratio")
        report("kept: k3", divergence["kept"], divergence["plain"], "<= 1.5", "nats/token")
        generator.close()
    remove_shared_memory(JOB)


def compute_log_probs(trainer: TrainEngine, samples: Batch) -> Tensor:
    return trainer.forward(samples, temperature=1.0).ragged("log_probs").values


def mean_ratio(found: Tensor, said: Tensor) -> float:
    return (found - said).exp().mean().item()


def measure_learning(seeds: list[int]) -> None:
    """Learn the built-in task on one device."""
    kept = [f"rollout.{name}={value}" for name, value in KEPT.items()]
    pairs = []
    for seed in seeds:
        pairs.append((learn(seed, kept), learn(seed, [])))
        report(f"seed {seed}: accuracy", *pairs[-1], "report", "share")
    means = map(statistics.mean, zip(*pairs, strict=True))
    report("kept: accuracy, mean of the seeds", *means, "as well", "share")


def learn(seed: int, settings: list[str]) -> float:
    """Return the accuracy at the end."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "hybridrl.main", *TASK, *settings]
        command += [f"run.directory={run}", f"run.seed={seed}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=dict(os.environ))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([line["accuracy"] for line in lines if "accuracy" in line][-1])


if __name__ == "__main__":
    main()
