"""Supervised fine-tuning on given responses."""

from __future__ import annotations

from collections.abc import Mapping

from hybridrl.config.effective_settings import trainer_settings
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef
from hybridrl.evaluation.held_out_metrics import collect_token_sums
from hybridrl.trainers import trainer as base
from hybridrl.trainers.role_spec import LEARNER_ROLE, RoleSpec
from hybridrl.trainers.trainer import SAMPLE_COLUMNS, UPDATE_COLUMNS, StepResult


class Trainer(base.Trainer):
    """The trainer of supervised fine-tuning."""

    USES = trainer_settings("sft")
    DATA = "examples"

    @staticmethod
    def roles(config: Config) -> Mapping[str, RoleSpec]:
        return {"actor": LEARNER_ROLE}

    def step(self) -> StepResult:
        batch, update = self.next_batch(), self.groups["actor"].update_supervised
        return StepResult(
            batch, [update(part.select(*UPDATE_COLUMNS)) for part in self.mini_batches(batch)]
        )

    def evaluate(self, held_out: BatchRef) -> dict[str, float]:
        """Return `eval/loss`, the loss per token of the held-out responses."""
        batch = held_out | self.groups["actor"].compute_log_prob(held_out.select(*SAMPLE_COLUMNS))
        sums = collect_token_sums(batch, "log_probs")
        return {"eval/loss": float(-sums["total"].sum() / sums["tokens"].sum())}

    def compute_held_out_loss(self, held_out: BatchRef) -> float:
        return self.evaluate(held_out)["eval/loss"]
