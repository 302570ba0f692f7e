"""GRPO: rewards of a prompt's samples, compared with each other, reinforce the policy.

Shao et al. 2024, arXiv:2402.03300. By its settings it is also Dr. GRPO, DAPO, GSPO, CISPO, SAPO,
GMPO, RLOO, REINFORCE++, OPO and pass@k training: `algorithm=<name>`.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridrl.algorithms import keep_informative
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, Handle
from hybridrl.trainers import base
from hybridrl.trainers.base import LEARNED_FROM, SAMPLE, SAMPLED
from hybridrl.trainers.shaping import GROUP_COLUMNS, group_advantages, loss_weights


class Trainer(base.Trainer):
    """The driver program of GRPO."""

    @staticmethod
    def roles(config: Config) -> list[str]:
        reference = ["reference"] if config.algorithm.kl_coefficient else []
        return ["actor", "reward", *reference]

    def step(self) -> tuple[BatchRef, list[Handle]]:
        config, longest = self.config.algorithm, self.config.rollout.max_tokens
        actor, reference = self.groups["actor"], self.groups.get("reference")
        updates = self.config.actor.updates_per_step
        columns = [*LEARNED_FROM, *SAMPLED, "advantages"]

        batch = self._informative_samples() if config.dynamic_sampling else self._samples()
        if reference is not None:
            batch |= reference.compute_ref_log_prob(batch.select(*SAMPLE))
            columns.append("ref_log_probs")
        if updates > 1 or config.kl_in_reward:  # else the policy that sampled is the one updated
            batch |= actor.compute_log_prob(batch.select(*SAMPLE))
            columns.append("log_probs")
        compare = partial(group_advantages, config=config, longest=longest)
        shaped = [*GROUP_COLUMNS, *(("log_probs", "ref_log_probs") if config.kl_in_reward else ())]
        batch |= batch.apply(compare, shaped)

        weigh = partial(loss_weights, mode=config.aggregation, longest=longest)
        metrics = []
        for mini_batch in batch.split(updates):
            mini_batch |= mini_batch.apply(weigh, ["response_mask"])
            metrics.append(actor.update_actor(mini_batch.select(*columns)))
        return batch, metrics

    def _samples(self) -> BatchRef:
        batch = self.next_batch().repeat(self.config.rollout.samples_per_prompt)
        batch |= self.groups["actor"].generate_sequences(batch, self.sampling)
        return batch | self.groups["reward"].compute_reward(batch)

    def _informative_samples(self) -> BatchRef:
        """DAPO's dynamic sampling: samples of prompts whose scores differ, as many prompts as a
        step has, from up to `algorithm.max_refills` further generations."""
        rounds = 1 + self.config.algorithm.max_refills
        per_prompt = self.config.rollout.samples_per_prompt
        wanted = self.config.data.prompts_per_step * per_prompt
        kept: list[BatchRef] = []
        count, prompts = 0, 0
        for _ in range(rounds):
            batch = self._samples()
            known = batch.collect(["scores", "group_id"])  # two numbers a sample
            rows = _informative_rows(known["scores"], known["group_id"])
            prompts += len(known) // per_prompt
            if len(rows):
                kept.append(batch.take(rows[: wanted - count]))
                count += min(len(rows), wanted - count)
            if count >= wanted:
                break
        self.figures["dynamic/informative"] = count / per_prompt / prompts
        self.figures["dynamic/generations"] = prompts * per_prompt / wanted
        if count < wanted:
            self.notices.append(
                f"Only {count // per_prompt} of {prompts} prompts had samples of different scores, "
                f"after {rounds} generations (algorithm.max_refills); the step learns from those."
            )
        return BatchRef.concat(kept) if kept else batch


def _informative_rows(scores: Tensor, groups: Tensor) -> npt.NDArray[np.int64]:
    """The rows of all prompts whose scores differ, those of dropped samples (NaN) aside."""
    scored = ~torch.isnan(scores)
    informative = keep_informative(scores[scored], groups[scored])
    return np.flatnonzero(torch.isin(groups, groups[scored][informative]))
