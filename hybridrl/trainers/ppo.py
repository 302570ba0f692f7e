"""PPO: a critic tells what each token was worth; the policy takes clipped steps.

Schulman et al. 2017, arXiv:1707.06347; for language models Ouyang et al. 2022, arXiv:2203.02155.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, Handle
from hybridrl.trainers import base
from hybridrl.trainers.adaptive_kl import KLCoefficient
from hybridrl.trainers.base import LEARNED_FROM, SAMPLE, SAMPLED
from hybridrl.trainers.shaping import TOKEN_COLUMNS, critic_advantages, loss_weights

ACTOR_COLUMNS = (*LEARNED_FROM, *SAMPLED, "log_probs", "advantages")
CRITIC_COLUMNS = (*LEARNED_FROM, "values", "returns")


class Trainer(base.Trainer):
    """The driver program of PPO."""

    SAVED: ClassVar = {"actor": "model", "critic": "critic"}

    def prepare(self) -> None:
        self.kl = KLCoefficient(self.config)
        self.steps = 0

    @staticmethod
    def roles(config: Config) -> list[str]:
        reference = ["reference"] if config.algorithm.kl_coefficient else []
        return ["actor", "critic", "reward", *reference]

    def step(self) -> tuple[BatchRef, list[Handle]]:
        config, longest = self.config.algorithm, self.config.rollout.max_tokens
        actor, critic = self.groups["actor"], self.groups["critic"]
        reference = self.groups.get("reference")
        with_kl = ["ref_log_probs"] if reference is not None else []

        batch = self.next_batch().repeat(self.config.rollout.samples_per_prompt)
        batch |= actor.generate_sequences(batch, self.sampling)
        batch |= self.groups["reward"].compute_reward(batch)
        batch |= actor.compute_log_prob(batch.select(*SAMPLE))
        if reference is not None:
            batch |= reference.compute_ref_log_prob(batch.select(*SAMPLE))
        batch |= critic.compute_values(batch.select(*SAMPLE))
        credit = partial(
            critic_advantages, config=config, longest=longest, coefficient=self.kl.update()
        )
        batch |= batch.apply(credit, [*TOKEN_COLUMNS, "values", "log_probs", *with_kl])

        weigh = partial(loss_weights, mode=config.aggregation, longest=longest)
        metrics = []
        for mini_batch in batch.split(self.config.actor.updates_per_step):
            mini_batch |= mini_batch.apply(weigh, ["response_mask"])
            metrics.append(critic.update_critic(mini_batch.select(*CRITIC_COLUMNS)))
            if self.steps >= self.config.critic.warmup_steps:
                updated = actor.update_actor(mini_batch.select(*ACTOR_COLUMNS, *with_kl))
                metrics.append(self.kl.watch(updated))
        if (coefficient := config.ptx_coefficient) > 0:
            actor.update_supervised(self.next_examples(coefficient))
        self.steps += 1
        self.figures["policy/kl_coefficient"] = self.kl.coefficient
        return batch, metrics
