"""Reward models for many annotators, domains or users, each with few preference pairs.

Model-agnostic meta-learning (Finn et al. 2017, arXiv:1703.03400) of the Bradley-Terry loss: the
weights with which a task (an annotator) sums reward features adapt to its support pairs, and the
model learns from the loss of its query pairs at the adapted weights. How ranks share the work
follows G-Meta (Xiao et al. 2023, arXiv:2401.04338).
"""

from __future__ import annotations

from collections.abc import Mapping

from hybridrl.config.effective_settings import trainer_settings
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, WorkerGroup
from hybridrl.data.task_blocks import TASK_BLOCK_COLUMNS
from hybridrl.evaluation.held_out_metrics import compute_pair_metrics
from hybridrl.trainers import trainer as base
from hybridrl.trainers.role_spec import RoleSpec
from hybridrl.trainers.trainer import SAMPLE_COLUMNS, StepResult

_TASK_COLUMNS = ("features", *TASK_BLOCK_COLUMNS)
_ROLE = "reward_model"


class Trainer(base.Trainer):
    """The trainer of reward models that adapt to tasks."""

    USES = trainer_settings("meta_reward_model")
    DATA = "pairs"

    @staticmethod
    def roles(config: Config) -> Mapping[str, RoleSpec]:
        return {_ROLE: RoleSpec("meta_reward_model", saves_as="model")}

    @property
    def _group(self) -> WorkerGroup:
        return self.groups[_ROLE]

    def step(self) -> StepResult:
        batch = self.next_batch()
        batch |= self._group.compute_features(batch.select(*SAMPLE_COLUMNS))
        columns = (*SAMPLE_COLUMNS, *_TASK_COLUMNS)
        return StepResult(batch, [self._group.update_tasks(batch.select(*columns))])

    def evaluate(self, held_out: BatchRef) -> dict[str, float]:
        """Return figures of the query pairs of held-out tasks: `eval/pair_accuracy` and
        `eval/pair_margin` after adapting to their support pairs, and `eval/shared_pair_accuracy`
        before. Tasks that were not learned from begin from the shared start."""
        held_out |= self._group.compute_features(held_out.select(*SAMPLE_COLUMNS))
        scored = self._group.compute_task_scores(held_out.select(*_TASK_COLUMNS))
        found = (held_out | scored).collect(["scores", "shared_scores", "is_query"])
        if not (query := found["is_query"].bool()).any():
            return {}
        shared = compute_pair_metrics(found["shared_scores"][query])
        return {
            **compute_pair_metrics(found["scores"][query]),
            "eval/shared_pair_accuracy": shared["eval/pair_accuracy"],
        }
