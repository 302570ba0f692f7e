"""Packed against padded training: forward and backward of the same samples.

    python benchmarks/packing.py

Padding computes on longest/mean as many tokens, which is the ideal speed-up of packing. The figure
is the measured speed-up as a share of that ideal.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from figures import interleave, report
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybridrl.batch.batch import Batch
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.models.packed_samples import PackedSamples

SAMPLES, LONGEST, PROMPT, ROUNDS = 32, 256, 8, 7


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LONGEST,
    )
    return Qwen2ForCausalLM(config)


def lengths_with_mean(share: float) -> np.ndarray:
    """Long-tailed lengths up to LONGEST with mean `share` of it."""
    generator = np.random.default_rng(0)
    low, high = 0.01, 100.0
    draws = generator.random(SAMPLES - 1)
    for _ in range(60):  # the exponent that gives this mean
        middle = (low * high) ** 0.5
        lengths = np.maximum(2 * PROMPT, LONGEST * draws**middle)
        low, high = (middle, high) if lengths.mean() > share * LONGEST else (low, middle)
    return np.append(lengths.astype(int), LONGEST)


def main() -> None:
    torch.set_num_threads(1)
    ours, theirs = model(), model()
    ours.set_attn_implementation(PACKED_ATTENTION)
    policy = CausalPolicy(ours)
    for share in (0.3, 0.6):
        lengths = lengths_with_mean(share)
        rows = [torch.randint(512, (int(length),)) for length in lengths]
        batch = Batch.from_columns(
            {
                "prompt_ids": [row[:PROMPT] for row in rows],
                "response_ids": [row[PROMPT:] for row in rows],
            }
        )
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(LONGEST)[None] < torch.from_numpy(lengths)[:, None]

        def packed(batch: Batch = batch) -> float:
            begin = time.perf_counter()
            log_probs = policy(PackedSamples.of(batch, torch.device("cpu")))["log_probs"]
            log_probs.sum().backward()
            return time.perf_counter() - begin

        def padded(ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> float:
            begin = time.perf_counter()
            logits = theirs(input_ids=ids, attention_mask=mask).logits[:, PROMPT - 1 : -1]
            log_probs = torch.log_softmax(logits.float(), -1)
            chosen = log_probs.gather(-1, ids[:, PROMPT:, None]).squeeze(-1)
            (chosen * mask[:, PROMPT:]).sum().backward()
            return time.perf_counter() - begin

        packed(), padded()
        seconds = interleave(packed, padded, ROUNDS)
        ideal = SAMPLES * LONGEST / int(lengths.sum())
        name = f"packing at mean/longest {lengths.mean() / LONGEST:.2f}: speed-up against ideal"
        report(name, seconds[1] / seconds[0], ideal, ">= 0.85", "x")


if __name__ == "__main__":
    main()
