"""Supervised fine-tuning: the given responses become likelier."""

from __future__ import annotations

from functools import partial

from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, Handle
from hybridrl.trainers import base
from hybridrl.trainers.base import LEARNED_FROM, SAMPLE
from hybridrl.trainers.evaluation import row_sums
from hybridrl.trainers.shaping import loss_weights


class Trainer(base.Trainer):
    """The driver program of supervised fine-tuning."""

    DATA = "examples"
    GENERATES = False

    @staticmethod
    def roles(config: Config) -> list[str]:
        return ["actor"]

    def step(self) -> tuple[BatchRef, list[Handle]]:
        batch = self.next_batch()
        weigh = partial(
            loss_weights,
            mode=self.config.algorithm.aggregation,
            longest=self.config.rollout.max_tokens,
        )
        metrics = []
        for mini_batch in batch.split(self.config.actor.updates_per_step):
            mini_batch |= mini_batch.apply(weigh, ["response_mask"])
            metrics.append(self.groups["actor"].update_supervised(mini_batch.select(*LEARNED_FROM)))
        return batch, metrics

    def evaluate(self, held_out: BatchRef) -> dict[str, float]:
        """`eval/loss`, per token of the held-out responses."""
        batch = held_out | self.groups["actor"].compute_log_prob(held_out.select(*SAMPLE))
        total = partial(row_sums, column="log_probs")
        sums = batch.apply(total, ["log_probs", "response_mask"]).collect()
        return {"eval/loss": float(-sums["total"].sum() / sums["tokens"].sum())}
