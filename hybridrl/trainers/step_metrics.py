"""The figures of a step, from what the ranks reported and what the updates measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from hybridrl.core.record import Record
from hybridrl.observe.step_clock import phase_shares

POLICY = {
    "loss": "policy/loss",
    "entropy": "policy/entropy",
    "kl": "policy/kl",
    "approx_kl": "policy/approx_kl",
    "clip_fraction": "policy/clip_fraction",
    "grad_norm": "policy/grad_norm",
    "learning_rate": "policy/learning_rate",
    "mismatch_k3": "mismatch/k3",
    "mismatch_abs_max": "mismatch/max_abs",
    "tokens": "policy/tokens",
}
"""Metrics of an update, and the names under which they are written."""


def step_metrics(
    records: Sequence[Record], updates: Sequence[Mapping[str, float]], seconds: float
) -> dict[str, float]:
    """All metrics of one step.

    Args:
        records: Of every call of the step, by every rank.
        updates: Metrics of each optimizer step.
        seconds: Wall time of the step.
    """
    total: dict[str, float] = defaultdict(float)
    for record in records:
        for name, value in record.metrics.items():
            total[name] += value
    samples, scored = max(1.0, total["samples"]), max(1.0, total["scored"])
    mean = total["reward_sum"] / scored
    variance = max(0.0, total["reward_square_sum"] / scored - mean * mean)
    metrics = {
        "reward/mean": mean,
        "reward/std": math.sqrt(variance),
        "reward/correct": total["correct"] / scored,
        "reward/failures": total["reward_failures"],
        "reward/timeouts": total["reward_timeouts"],
        "response/length_mean": total["response_tokens"] / samples,
        "response/truncated": total["truncated"] / samples,
        "response/tokens": total["response_tokens"],
        "throughput/tokens_per_second": total["response_tokens"] / seconds,
        "time/step": seconds,
    }
    for name, written in POLICY.items():
        found = [update[name] for update in updates if name in update]
        if found:
            # A step with several updates begins at the policy that sampled: there mismatch counts.
            first = written.startswith("mismatch/")
            metrics[written] = found[0] if first else sum(found) / len(found)
    return metrics | phase_shares(records, seconds)
