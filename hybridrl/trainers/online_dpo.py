"""Online DPO: the best and the worst sample of each prompt become a preference pair.

Guo et al. 2024, arXiv:2402.04792. What is better may be said by functions, a judge or a reward
model. A prompt whose samples score alike has no pair and teaches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridrl.algorithms import PreferenceObjective
from hybridrl.config.effective_settings import trainer_settings
from hybridrl.config.schema import Config
from hybridrl.trainers.dpo import update_on_pairs
from hybridrl.trainers.objectives import build_preference_objective, list_reference_roles
from hybridrl.trainers.policy_trainer import PolicyTrainer, join_columns
from hybridrl.trainers.role_spec import RoleSpec, standard_roles
from hybridrl.trainers.trainer import StepResult
from hybridrl.trainers.update_columns import SHAPED, learned_scores


class Trainer(PolicyTrainer):
    """The trainer of online DPO."""

    USES = trainer_settings("online_dpo")
    COMPARES_SAMPLES = True

    @classmethod
    def roles(cls, config: Config) -> Mapping[str, RoleSpec]:
        return standard_roles("actor", *list_reference_roles(config), "reward")

    @staticmethod
    def objective(config: Config) -> PreferenceObjective:
        return build_preference_objective(config)

    def step(self) -> StepResult:
        samples = self.samples()
        samples = join_columns(samples, self.rewarded(samples))
        scores = learned_scores(samples.collect(["scores", SHAPED], partial=True))
        rows = select_best_and_worst(scores, self.config.rollout.samples_per_prompt)
        prompts = len(scores) // self.config.rollout.samples_per_prompt
        metrics = {"pairs/prompts": len(rows) / 2 / max(1, prompts)}
        _, update = update_on_pairs(self.groups, samples.take(rows))
        return StepResult(samples, [update], metrics)


def select_best_and_worst(scores: Tensor, per_prompt: int) -> npt.NDArray[np.int64]:
    """Return the rows of the best and the worst sample of each prompt, next to each other; none for
    a prompt whose samples all score alike. Dropped samples (NaN) are neither.

    Args:
        scores: `[rows]`, the `per_prompt` samples of a prompt next to each other.
    """
    groups = scores.view(-1, per_prompt)
    dropped = groups.isnan()
    best, best_at = groups.masked_fill(dropped, -torch.inf).max(1)
    worst, worst_at = groups.masked_fill(dropped, torch.inf).min(1)
    ends = torch.stack([best_at, worst_at], 1) + torch.arange(len(groups))[:, None] * per_prompt
    return np.asarray(ends[best > worst].flatten().numpy(), dtype=np.int64)
