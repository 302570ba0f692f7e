"""ReMax: the policy's own greedy answer is the baseline, so no critic is needed.

Li et al. 2023, arXiv:2310.10505.
"""

from __future__ import annotations

from functools import partial

from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, Handle
from hybridrl.trainers import base
from hybridrl.trainers.adaptive_kl import KLCoefficient
from hybridrl.trainers.base import LEARNED_FROM, SAMPLE, SAMPLED
from hybridrl.trainers.shaping import TOKEN_COLUMNS, as_baseline, greedy_advantages, loss_weights

ACTOR_COLUMNS = (*LEARNED_FROM, *SAMPLED, "log_probs", "advantages")


class Trainer(base.Trainer):
    """The driver program of ReMax."""

    def prepare(self) -> None:
        self.kl = KLCoefficient(self.config)

    @staticmethod
    def roles(config: Config) -> list[str]:
        reference = ["reference"] if config.algorithm.kl_coefficient else []
        return ["actor", "reward", *reference]

    def step(self) -> tuple[BatchRef, list[Handle]]:
        config, longest = self.config.algorithm, self.config.rollout.max_tokens
        actor, reward = self.groups["actor"], self.groups["reward"]
        reference = self.groups.get("reference")
        with_kl = ["ref_log_probs"] if reference is not None else []
        prompts = self.next_batch()
        per_prompt = self.config.rollout.samples_per_prompt

        greedy = prompts | actor.generate_sequences(prompts, self.sampling.greedy())
        greedy |= reward.compute_reward(greedy)
        batch = prompts.repeat(per_prompt)
        batch |= actor.generate_sequences(batch, self.sampling)
        batch |= reward.compute_reward(batch)
        batch |= greedy.apply(as_baseline, ["scores"]).repeat(per_prompt)
        batch |= actor.compute_log_prob(batch.select(*SAMPLE))
        if reference is not None:
            batch |= reference.compute_ref_log_prob(batch.select(*SAMPLE))
        credit = partial(
            greedy_advantages, config=config, longest=longest, coefficient=self.kl.update()
        )
        batch |= batch.apply(credit, [*TOKEN_COLUMNS, "greedy_scores", "log_probs", *with_kl])

        weigh = partial(loss_weights, mode=config.aggregation, longest=longest)
        metrics = []
        for mini_batch in batch.split(self.config.actor.updates_per_step):
            mini_batch |= mini_batch.apply(weigh, ["response_mask"])
            updated = actor.update_actor(mini_batch.select(*ACTOR_COLUMNS, *with_kl))
            metrics.append(self.kl.watch(updated))
        self.figures["policy/kl_coefficient"] = self.kl.coefficient
        return batch, metrics
