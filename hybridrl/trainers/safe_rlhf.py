"""Safe RLHF: as much reward as a limit on the cost allows; a multiplier learns what cost is worth.

Dai et al. 2023, arXiv:2310.12773.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from hybridrl.algorithms import LagrangeMultiplier
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, Handle
from hybridrl.trainers import base
from hybridrl.trainers.adaptive_kl import KLCoefficient
from hybridrl.trainers.base import LEARNED_FROM, SAMPLE, SAMPLED
from hybridrl.trainers.shaping import TOKEN_COLUMNS, constrained_advantages, loss_weights

ACTOR_COLUMNS = (*LEARNED_FROM, *SAMPLED, "log_probs", "advantages")
CRITIC_COLUMNS = {
    "critic": (*LEARNED_FROM, "values", "returns"),
    "cost_critic": (*LEARNED_FROM, "cost_values", "cost_returns"),
}
SHAPED = (*TOKEN_COLUMNS, "costs", "values", "cost_values", "log_probs")


class Trainer(base.Trainer):
    """The driver program of Safe-RLHF."""

    SAVED: ClassVar = {"actor": "model", "critic": "critic", "cost_critic": "cost_critic"}

    def prepare(self) -> None:
        cost = self.config.cost
        self.kl = KLCoefficient(self.config)
        self.multiplier = LagrangeMultiplier(cost.multiplier, cost.limit, cost.multiplier_rate)
        self.last_costs: BatchRef | None = None

    @staticmethod
    def roles(config: Config) -> list[str]:
        reference = ["reference"] if config.algorithm.kl_coefficient else []
        return ["actor", "critic", "cost_critic", "reward", "cost", *reference]

    def step(self) -> tuple[BatchRef, list[Handle]]:
        config, longest = self.config.algorithm, self.config.rollout.max_tokens
        groups, actor, reference = self.groups, self.groups["actor"], self.groups.get("reference")
        with_kl = ["ref_log_probs"] if reference is not None else []
        if self.last_costs is not None:  # one number a sample
            costs = self.last_costs.collect(["costs"])["costs"]
            self.multiplier.update(float(costs.nanmean()))

        batch = self.next_batch().repeat(self.config.rollout.samples_per_prompt)
        batch |= actor.generate_sequences(batch, self.sampling)
        batch |= groups["reward"].compute_reward(batch)
        batch |= (costs := groups["cost"].compute_reward(batch))
        batch |= actor.compute_log_prob(batch.select(*SAMPLE))
        if reference is not None:
            batch |= reference.compute_ref_log_prob(batch.select(*SAMPLE))
        batch |= groups["critic"].compute_values(batch.select(*SAMPLE))
        batch |= groups["cost_critic"].compute_values(batch.select(*SAMPLE))
        credit = partial(
            constrained_advantages,
            config=config,
            longest=longest,
            coefficient=self.kl.update(),
            multiplier=self.multiplier.value,
        )
        batch |= batch.apply(credit, [*SHAPED, *with_kl])

        weigh = partial(loss_weights, mode=config.aggregation, longest=longest)
        metrics = []
        for mini_batch in batch.split(self.config.actor.updates_per_step):
            mini_batch |= mini_batch.apply(weigh, ["response_mask"])
            for critic, columns in CRITIC_COLUMNS.items():
                metrics.append(groups[critic].update_critic(mini_batch.select(*columns)))
            updated = actor.update_actor(mini_batch.select(*ACTOR_COLUMNS, *with_kl))
            metrics.append(self.kl.watch(updated))
        if (coefficient := config.ptx_coefficient) > 0:
            actor.update_supervised(self.next_examples(coefficient))
        self.last_costs = costs
        self.figures["cost/multiplier"] = self.multiplier.value
        return batch, metrics
