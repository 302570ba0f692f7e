"""GRPO: rewards of a prompt's samples, compared with each other, reinforce the policy.

Shao et al. 2024, arXiv:2402.03300. By its settings it is also Dr. GRPO, DAPO, GSPO, CISPO, SAPO,
GMPO, RLOO, REINFORCE++, OPO and pass@k training: `algorithm=<name>`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hybridrl.config.effective_settings import trainer_settings
from hybridrl.controller import BatchRef
from hybridrl.trainers.policy_trainer import PolicyTrainer, joined
from hybridrl.trainers.replay_buffer import Replay, informative_rows
from hybridrl.trainers.reward_shaper import SHAPED, learned_scores
from hybridrl.trainers.trainer import StepResult
from hybridrl.trainers.update_columns import (
    ADVANTAGES,
    GROUP_COLUMNS,
    group_advantages,
    splits_by_group,
)


class Trainer(PolicyTrainer):
    """The driver program of GRPO."""

    USES = trainer_settings("grpo")
    COMPARES_SAMPLES = True

    def prepare(self) -> None:
        super().prepare()
        self.replay = Replay(self.config)

    def step(self) -> StepResult:
        config, longest = self.config.algorithm, self.config.rollout.max_tokens
        # With one update the policy that sampled is the one updated.
        old = ["log_probs"] if self.config.actor.updates_per_step > 1 or config.kl_in_reward else []
        if config.dynamic_sampling:
            drawn = self._informative_samples()
            samples, judged = drawn.batch, []
        else:
            samples = self.samples()
            judged = self.rewarded(samples)
            drawn = StepResult(samples, scored_samples=[joined(samples, judged)])
        # Behind the calls of this step: the samples of the one before may not be scored yet.
        beside = config.ptx_coefficient > 0
        version = self.steps * (self.config.actor.updates_per_step + beside)
        replayed = self.replay.draw(version)
        rows, judged = self.unfold(samples, judged)
        batch = joined(rows, [*judged, *self.score(rows, log_probs=bool(old))])
        compare = partial(group_advantages, config=config, longest=longest)
        kl = ["log_probs", "ref_log_probs"] if config.kl_in_reward else []
        # The hosts of the actor share the prompts, if the samples of one are compared alone.
        per_prompt = self.config.rollout.samples_per_prompt
        batch |= batch.apply(
            compare,
            [*GROUP_COLUMNS, *self.credited, *kl],
            makes=ADVANTAGES,
            on=self.groups["actor"],
            together=per_prompt if splits_by_group(config) and rows is samples else None,
        )
        self.replay.keep(batch, version)
        return replace(
            drawn,
            batch=batch,
            updates=self.learn(BatchRef.concat([batch, *replayed]), *old),
            metrics={**drawn.metrics, **self.replay.figures},
        )

    def _informative_samples(self) -> StepResult:
        """DAPO's dynamic sampling: samples of prompts whose scores differ, as many prompts as a
        step has, from up to `algorithm.max_refills` further generations; and what they tell of."""
        rounds = 1 + self.config.algorithm.max_refills
        per_prompt = self.config.rollout.samples_per_prompt
        wanted = self.config.data.prompts_per_step * per_prompt
        kept: list[BatchRef] = []
        scored: list[BatchRef] = []
        count, prompts = 0, 0
        for _ in range(rounds):
            samples = self.samples()
            batch = joined(samples, self.rewarded(samples))
            scored.append(batch)
            known = batch.collect(["scores", SHAPED, "group_id"], partial=True)  # few numbers
            rows = informative_rows(learned_scores(known), known["group_id"])
            prompts += len(known) // per_prompt
            if len(rows):
                kept.append(batch.take(rows[: wanted - count]))
                count += min(len(rows), wanted - count)
            if count >= wanted:
                break
        metrics = {
            "dynamic/informative": count / per_prompt / prompts,
            "dynamic/generations": prompts * per_prompt / wanted,
        }
        notice = (
            f"Only {count // per_prompt} of {prompts} prompts had samples of different scores, "
            f"after {rounds} generations (algorithm.max_refills); the step learns from those."
        )
        return StepResult(
            BatchRef.concat(kept) if kept else batch,
            metrics=metrics,
            notices=[notice] if count < wanted else [],
            scored_samples=scored,
        )
