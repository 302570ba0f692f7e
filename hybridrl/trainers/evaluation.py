"""Greedy answers to held-out prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridrl.errors import DataError

if TYPE_CHECKING:
    from hybridrl.job import Job


def accuracy(job: Job) -> float:
    """Share of the held-out prompts whose greedy answer scores `reward.correct_at` or more.

    Raises:
        DataError: if the job has no held-out prompts.
    """
    if job.held_out is None:
        raise DataError(
            "There are no held-out prompts: the data is too small to spare any. Set data.eval_path."
        )
    actor, reward = job.groups["actor"], job.groups["reward"]
    batch = job.put(job.held_out)
    batch |= actor.generate_sequences(batch, job.sampling.greedy())
    batch |= reward.compute_reward(batch)
    scores = batch.collect(["scores"])["scores"]
    return float((scores >= job.config.reward.correct_at).float().mean())
