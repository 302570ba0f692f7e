"""PPO: a critic estimates the value of each token; the policy takes clipped steps.

Schulman et al. 2017, arXiv:1707.06347; for language models Ouyang et al. 2022, arXiv:2203.02155.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from hybridrl.config.effective_settings import trainer_settings
from hybridrl.trainers.policy_trainer import PolicyTrainer, join_columns
from hybridrl.trainers.trainer import StepResult
from hybridrl.trainers.update_columns import (
    ADVANTAGE_COLUMNS,
    TOKEN_COLUMNS,
    critic_advantages,
)


class Trainer(PolicyTrainer):
    """The trainer of PPO."""

    USES = trainer_settings("ppo")
    ROLES = ("actor", "critic", "reward")
    CRITICS: ClassVar = {"critic": ("values", "returns")}

    def step(self) -> StepResult:
        config, longest = self.config.algorithm, self.config.rollout.max_tokens
        with_kl = ["ref_log_probs"] if "reference" in self.groups else []
        samples = self.samples()
        judged = self.rewarded(samples)
        rows, of_rows = self.unfold(samples, judged)
        batch = join_columns(rows, [*of_rows, *self.score(rows)])
        coefficient = self.kl.update()
        credit = partial(critic_advantages, config=config, longest=longest, coefficient=coefficient)
        shaped = [*TOKEN_COLUMNS, *self.credited, "values", "log_probs", *with_kl]
        batch |= batch.apply(
            credit, shaped, makes=[*ADVANTAGE_COLUMNS, "returns"], on=self.groups["actor"]
        )
        return StepResult(
            batch,
            self.learn(batch, "log_probs"),
            metrics={"policy/kl_coefficient": coefficient},
            scored_samples=[join_columns(samples, judged)],
        )
