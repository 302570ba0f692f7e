"""Reward modelling: a scalar head learns to score the preferred response of a pair higher.

Bradley & Terry 1952; for language models Ouyang et al. 2022, arXiv:2203.02155. A cost model for
`safe_rlhf` is trained the same way, on pairs whose first answer is the more harmful one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor
from torch.nn.functional import softplus

from hybridrl.config.effective_settings import trainer_settings
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef
from hybridrl.evaluation.held_out_metrics import compute_pair_metrics
from hybridrl.trainers import trainer as base
from hybridrl.trainers.role_spec import RoleSpec, standard_roles
from hybridrl.trainers.trainer import SAMPLE_COLUMNS, UPDATE_COLUMNS, StepResult
from hybridrl.trainers.update_columns import loss_weights


class Trainer(base.Trainer):
    """The trainer of reward models and cost models."""

    USES = trainer_settings("reward_model")
    DATA = "pairs"

    @staticmethod
    def roles(config: Config) -> Mapping[str, RoleSpec]:
        return standard_roles("reward_model")

    def step(self) -> StepResult:
        weigh = partial(loss_weights, mode="seq-mean-token-mean")
        batch = self.next_batch()
        batch |= batch.apply(weigh, ["response_mask"], makes=["loss_weights"])
        update = self.groups["reward_model"].update_reward_model
        return StepResult(batch, [update(batch.select(*UPDATE_COLUMNS, "margin"))])

    def evaluate(self, held_out: BatchRef) -> dict[str, float]:
        """Return `eval/pair_accuracy` and `eval/pair_margin` of the held-out pairs."""
        return compute_pair_metrics(self._compute_scores(held_out))

    def compute_held_out_loss(self, held_out: BatchRef) -> float:
        scores = self._compute_scores(held_out)
        return float(softplus(scores[1::2] - scores[0::2]).mean())

    def _compute_scores(self, held_out: BatchRef) -> Tensor:
        scored = self.groups["reward_model"].compute_score(held_out.select(*SAMPLE_COLUMNS))
        scores: Tensor = scored.collect(["scores"])["scores"]
        return scores
