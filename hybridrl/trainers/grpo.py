"""GRPO: reinforces the policy by comparing the rewards of a prompt's samples with each other.

Shao et al. 2024, arXiv:2402.03300. By its settings it is also Dr. GRPO, DAPO, GSPO, CISPO, SAPO,
GMPO, RLOO, REINFORCE++, OPO and pass@k training: `algorithm=<name>`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from hybridrl.algorithms import find_informative_rows
from hybridrl.config.effective_settings import trainer_settings
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef
from hybridrl.trainers.policy_trainer import PolicyTrainer, join_columns, list_separate_rewards
from hybridrl.trainers.trainer import SAMPLE_COLUMNS, StepResult
from hybridrl.trainers.update_columns import (
    ADVANTAGE_COLUMNS,
    GROUP_COLUMNS,
    SHAPED,
    group_advantages,
    is_group_local,
    learned_scores,
)


class Trainer(PolicyTrainer):
    """The trainer of GRPO."""

    USES = trainer_settings("grpo")
    COMPARES_SAMPLES = True

    def prepare(self) -> None:
        super().prepare()
        self.replay = ReplayBuffer(self.config)

    def step(self) -> StepResult:
        config, longest = self.config.algorithm, self.config.rollout.max_tokens
        # With one update the policy that sampled is the one updated.
        old = ["log_probs"] if self.config.actor.step_updates > 1 or config.kl_in_reward else []
        if config.dynamic_sampling:
            drawn = self._informative_samples()
            samples, judged = drawn.batch, []
        else:
            samples = self.samples()
            judged = self.rewarded(samples)
            drawn = StepResult(samples, scored_samples=[join_columns(samples, judged)])
        # Behind the calls of this step: the samples of the one before may not be scored yet.
        beside = config.ptx_coefficient > 0
        version = self.steps * (self.config.actor.step_updates + beside)
        replayed = self.replay.draw(version)
        rows, judged = self.unfold(samples, judged)
        batch = join_columns(rows, [*judged, *self.score(rows, log_probs=bool(old))])
        rewards = list_separate_rewards(self.config)
        compare = partial(group_advantages, config=config, longest=longest, rewards=rewards)
        kl = ["log_probs", "ref_log_probs"] if config.kl_in_reward else []
        # The hosts of the actor share the prompts, if the samples of one are compared alone.
        per_prompt = self.config.rollout.samples_per_prompt
        batch |= batch.apply(
            compare,
            [*GROUP_COLUMNS, *self.credited, *kl, *rewards],
            makes=ADVANTAGE_COLUMNS,
            on=self.groups["actor"],
            together=per_prompt if is_group_local(config) and rows is samples else None,
        )
        self.replay.keep(batch, version)
        if old:  # of the policy that begins this step, not of the one of their own
            actor = self.groups["actor"]
            replayed = [r | actor.compute_log_prob(r.select(*SAMPLE_COLUMNS)) for r in replayed]
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
            batch = join_columns(samples, self.rewarded(samples))
            scored.append(batch)
            rows, groups = select_informative_rows(batch, list_separate_rewards(self.config))
            prompts += len(groups) // per_prompt
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


def select_informative_rows(
    batch: BatchRef, rewards: Collection[str]
) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
    """Return the rows of all prompts whose samples have different scores, and the groups of all
    rows; dropped samples (NaN) do not count.

    Args:
        rewards: Columns of those that are learned from each by itself, of which one must differ;
            empty: all that is learned from is the sum.
    """
    columns = ["scores", SHAPED, "group_id", *rewards]  # a few numbers a sample
    known = batch.collect(columns, partial=True)
    groups, whole = known["group_id"], learned_scores(known)
    found = []
    for scores in [known[name] for name in rewards] or [whole]:
        scored = ~torch.isnan(whole) & ~torch.isnan(scores)
        informative = find_informative_rows(scores[scored], groups[scored])
        found.append(groups[scored][informative])
    return np.flatnonzero(torch.isin(groups, torch.cat(found))), groups


def compute_max_replayed_prompts(config: Config) -> int:
    """Return the maximum number of earlier prompts that a step learns from."""
    share = config.algorithm.replay_share
    return int(share / (1 - share) * config.data.prompts_per_step + 1e-9)


@dataclass
class _Kept:
    """The samples of a step with their advantages, which stay with the workers that made them.

    Attributes:
        version: Updates that the policy had had when the step began.
        rows: By prompt that teaches something, the rows of its samples; None until it is known.
    """

    batch: BatchRef
    version: int
    rows: list[npt.NDArray[np.int64]] | None = None


class ReplayBuffer:
    """A buffer of the samples of recent steps, from which whole groups are drawn, at most the share
    `algorithm.replay_share` of what a step learns from. The loss corrects for samples of older
    policies (`algorithm.correction`, else the clipped ratio to the policy that sampled).

    Attributes:
        figures: Of the last draw: how many groups, and how many updates old.
    """

    def __init__(self, config: Config) -> None:
        self._most = compute_max_replayed_prompts(config)
        self._age = config.algorithm.replay_age
        self._kept: deque[_Kept] = deque()
        self._random = np.random.default_rng([config.run.seed, 3])
        self._rewards = list_separate_rewards(config)
        self.figures: dict[str, float] = {}

    def keep(self, batch: BatchRef, version: int) -> None:
        """Add the samples of a step; waits for nothing."""
        if self._most:
            self._kept.append(_Kept(batch, version))

    def draw(self, version: int) -> list[BatchRef]:
        """Draw samples of earlier steps for one that begins after `version` updates: none older
        than `algorithm.replay_age` updates, none twice, and no groups whose samples all score
        alike. Waits until the samples of the step before are scored."""
        while self._kept and version - self._kept[0].version > self._age:
            self._kept.popleft()
        if not self._most:
            return []
        for kept in self._kept:
            if kept.rows is None:
                rows, groups = select_informative_rows(kept.batch, self._rewards)
                mine = groups.numpy()[rows]
                kept.rows = [rows[mine == group] for group in np.unique(mine)]
        ages = [version - kept.version for kept in self._kept for _ in kept.rows or ()]
        number = min(self._most, len(ages))
        chosen = np.sort(self._random.permutation(len(ages))[:number])
        drawn = [ages[place] for place in chosen]
        self.figures = {"replay/groups": float(number)}
        if drawn:
            self.figures["replay/age_mean"] = float(np.mean(drawn))
            self.figures["replay/age_max"] = float(max(drawn))
        return self._parts(chosen)

    def _parts(self, chosen: npt.NDArray[np.int64]) -> list[BatchRef]:
        """Return the rows of the groups at these positions among all stored groups."""
        found, begin = [], 0
        for kept in self._kept:
            groups = kept.rows or []
            mine = chosen[(chosen >= begin) & (chosen < begin + len(groups))] - begin
            begin += len(groups)
            if len(mine):
                found.append(kept.batch.take(np.concatenate([groups[place] for place in mine])))
        return found
