"""PPO: a critic tells what each token was worth; the policy takes clipped steps.

Schulman et al. 2017, arXiv:1707.06347; for language models Ouyang et al. 2022, arXiv:2203.02155.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from hybridrl.controller import BatchRef, Handle
from hybridrl.trainers.policy_trainer import PolicyTrainer, joined
from hybridrl.trainers.update_columns import (
    ADVANTAGES,
    TOKEN_COLUMNS,
    critic_advantages,
)


class Trainer(PolicyTrainer):
    """The driver program of PPO."""

    ROLES = ("actor", "critic", "reward")
    CRITICS: ClassVar = {"critic": ("values", "returns")}

    def step(self) -> tuple[BatchRef, list[Handle]]:
        config, longest = self.config.algorithm, self.config.rollout.max_tokens
        with_kl = ["ref_log_probs"] if "reference" in self.groups else []
        samples = self.samples()
        rows, judged = self.unfold(samples, self.rewarded(samples))
        batch = joined(rows, [*judged, *self.score(rows)])
        coefficient = self.kl.update()
        credit = partial(critic_advantages, config=config, longest=longest, coefficient=coefficient)
        shaped = [*TOKEN_COLUMNS, *self.credited, "values", "log_probs", *with_kl]
        batch |= batch.apply(
            credit, shaped, makes=[*ADVANTAGES, "returns"], on=self.groups["actor"]
        )
        self.figures["policy/kl_coefficient"] = coefficient
        return batch, self.learn(batch, "log_probs")
