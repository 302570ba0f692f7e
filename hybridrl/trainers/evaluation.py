"""Greedy answers to held-out prompts."""

from __future__ import annotations

from hybridrl.controller import BatchRef, WorkerGroup
from hybridrl.rollout import Sampling


def accuracy(
    actor: WorkerGroup,
    reward: WorkerGroup,
    prompts: BatchRef,
    sampling: Sampling,
    correct_at: float,
) -> float:
    """Share of the prompts whose greedy answer scores at least `correct_at`."""
    batch = prompts | actor.generate_sequences(prompts, sampling.greedy())
    batch |= reward.compute_reward(batch)
    scores = batch.collect(["scores"])["scores"]
    return float((scores >= correct_at).float().mean())
