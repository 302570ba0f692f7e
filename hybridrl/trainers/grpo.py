"""GRPO: rewards of a prompt's samples, compared with each other, reinforce the policy.

Shao et al. 2024, arXiv:2402.03300. This page is the whole dataflow; nothing below it knows GRPO.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from hybridrl.algorithms import group_relative, token_weights
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, Handle, WorkerGroup
from hybridrl.core.batch import Batch
from hybridrl.rollout import Sampling

LEARNED_FROM = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "advantages")


class Trainer:
    """The driver program of GRPO."""

    @staticmethod
    def roles(config: Config) -> list[str]:
        """Worker groups that it needs."""
        reference = ["reference"] if config.algorithm.kl_coefficient else []
        return ["actor", "reward", *reference]

    def __init__(self, config: Config, groups: Mapping[str, WorkerGroup], sampling: Sampling):
        self.actor, self.reward = groups["actor"], groups["reward"]
        self.reference = groups.get("reference")
        self.sampling = sampling
        self.samples_per_prompt = config.rollout.samples_per_prompt
        self.updates = config.actor.updates_per_step
        self.advantages = partial(group_advantages, scale=config.algorithm.advantage_scale)
        self.weights = partial(
            loss_weights,
            mode=config.algorithm.aggregation,
            longest=config.rollout.max_tokens,
        )

    def step(self, prompts: BatchRef) -> tuple[BatchRef, list[Handle]]:
        """One step: the samples it made, and a handle on the metrics of each update."""
        batch = prompts.repeat(self.samples_per_prompt)
        batch |= self.actor.generate_sequences(batch, self.sampling)
        batch |= self.reward.compute_reward(batch)
        columns = [*LEARNED_FROM, "loss_weights"]
        if self.reference is not None:
            batch |= self.reference.compute_ref_log_prob(batch.select(*LEARNED_FROM[:2]))
            columns.append("ref_log_probs")
        if self.updates > 1:  # otherwise the policy of the update is the one that sampled
            batch |= self.actor.compute_log_prob(batch.select(*LEARNED_FROM[:2]))
            columns.append("log_probs")
        batch |= batch.apply(self.advantages, ["scores", "group_id", "response_mask"])
        metrics = []
        for mini_batch in batch.split(self.updates):
            mini_batch |= mini_batch.apply(self.weights, ["response_mask"])
            metrics.append(self.actor.update_actor(mini_batch.select(*columns)))
        return batch, metrics


def group_advantages(batch: Batch, scale: str) -> Batch:
    """`advantages`, one per sample, and the `response_mask` without the samples whose reward was
    dropped (NaN): they are compared with nothing and learned from not at all."""
    scores, groups = batch["scores"], batch["group_id"]
    mask = batch.ragged("response_mask")
    dropped = torch.isnan(scores)
    # Each dropped sample becomes a group of its own, whose advantage is 0.
    alone = groups.max() + 1 + torch.arange(len(groups))
    advantages = group_relative(
        scores.nan_to_num(), torch.where(dropped, alone, groups), scale=scale
    )
    kept = mask.values * (~dropped).repeat_interleave(mask.lengths)
    return Batch.from_columns(
        {"advantages": advantages, "response_mask": mask._replace(values=kept)}
    )


def loss_weights(batch: Batch, mode: str, longest: int) -> Batch:
    """`loss_weights`: the weight of each token in the loss of this whole mini-batch."""
    mask = batch.ragged("response_mask")
    dense, real = batch.padded("response_mask")
    weights = token_weights(dense.bool(), mode, length_norm=longest)
    return Batch.from_columns({"loss_weights": mask._replace(values=weights[real])})
