"""ReMax: the reward of the policy's greedy response is the baseline, so no critic is needed.

Li et al. 2023, arXiv:2310.10505.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from hybridrl.config.effective_settings import trainer_settings
from hybridrl.trainers.policy_trainer import PolicyTrainer, join_columns
from hybridrl.trainers.trainer import StepResult
from hybridrl.trainers.update_columns import (
    ADVANTAGE_COLUMNS,
    TOKEN_COLUMNS,
    greedy_advantages,
    greedy_baseline,
)


class Trainer(PolicyTrainer):
    """The trainer of ReMax."""

    USES = trainer_settings("remax")
    UNREAD_REASONS: ClassVar[Mapping[str, str]] = {
        **PolicyTrainer.UNREAD_REASONS,
        "algorithm.turn_credit": "the greedy response of ReMax has one score, and no turns to "
        "compare with",
    }

    def step(self) -> StepResult:
        config, longest = self.config.algorithm, self.config.rollout.max_tokens
        with_kl = ["ref_log_probs"] if "reference" in self.groups else []
        actor, per_prompt = self.groups["actor"], self.config.rollout.samples_per_prompt
        reward, prompts = self.groups["reward"], self.next_batch()

        greedy = prompts | actor.generate_sequences(prompts, self.sampling.greedy())
        samples = prompts.repeat(per_prompt)
        samples |= actor.generate_sequences(samples, self.sampling)
        greedy = join_columns(greedy, self.judge(greedy))
        penalised = partial(greedy_baseline, config=config, longest=longest)
        # Where the rewards are: hosts of the actor would wait for them before the reference scores.
        baseline = greedy.apply(penalised, TOKEN_COLUMNS, makes=["greedy_scores"], on=reward)
        judged = [*self.judge(samples), baseline.repeat(per_prompt)]
        rows, of_rows = self.unfold(samples, judged)
        batch = join_columns(rows, [*of_rows, *self.score(rows)])
        coefficient = self.kl.update()
        credit = partial(greedy_advantages, config=config, longest=longest, coefficient=coefficient)
        shaped = [*TOKEN_COLUMNS, *self.credited, "greedy_scores", "log_probs", *with_kl]
        # Samples do not depend on each other, so the hosts of the actor share them.
        together = 1 if rows is samples else None
        batch |= batch.apply(credit, shaped, makes=ADVANTAGE_COLUMNS, on=actor, together=together)
        return StepResult(
            batch,
            self.learn(batch, "log_probs"),
            metrics={"policy/kl_coefficient": coefficient},
            scored_samples=[join_columns(samples, judged)],
            other_samples={"greedy": greedy},
        )
