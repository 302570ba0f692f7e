"""DPO: learns from preference pairs directly, without a reward model and without generating.

Rafailov et al. 2023, arXiv:2305.18290; with `preference.loss=ipo` Azar et al. 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from hybridrl.algorithms import PreferenceObjective
from hybridrl.config.effective_settings import trainer_settings
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef
from hybridrl.evaluation.held_out_metrics import compute_pair_metrics, sum_token_column
from hybridrl.trainers import trainer as base
from hybridrl.trainers.objectives import build_preference_objective
from hybridrl.trainers.role_spec import LEARNER_ROLE, RoleSpec, standard_roles
from hybridrl.trainers.trainer import SAMPLE_COLUMNS, UPDATE_COLUMNS, StepResult
from hybridrl.trainers.update_columns import loss_weights


class Trainer(base.Trainer):
    """The trainer of DPO and IPO."""

    USES = trainer_settings("dpo")
    DATA = "pairs"

    @staticmethod
    def roles(config: Config) -> Mapping[str, RoleSpec]:
        return {"actor": LEARNER_ROLE, **standard_roles("reference")}

    @staticmethod
    def objective(config: Config) -> PreferenceObjective:
        return build_preference_objective(config)

    def step(self) -> StepResult:
        actor, reference = self.groups["actor"], self.groups["reference"]
        weigh = partial(loss_weights, mode="seq-mean-token-mean")
        batch = self.next_batch()
        batch |= batch.apply(weigh, ["response_mask"], makes=["loss_weights"])
        batch |= reference.compute_ref_log_prob(batch.select(*SAMPLE_COLUMNS))
        return StepResult(
            batch, [actor.update_preference(batch.select(*UPDATE_COLUMNS, "ref_log_probs"))]
        )

    def evaluate(self, held_out: BatchRef) -> dict[str, float]:
        """`eval/pair_accuracy` and `eval/pair_margin` of the implicit reward that is trained, beta
        times the log-ratio to the reference."""
        sample, columns = held_out.select(*SAMPLE_COLUMNS), ["log_probs", "ref_log_probs"]
        batch = held_out | self.groups["actor"].compute_log_prob(sample)
        batch |= self.groups["reference"].compute_ref_log_prob(sample)
        policy, reference = (
            batch.apply(
                partial(sum_token_column, column=column), [column, "response_mask"]
            ).collect()
            for column in columns
        )
        ratios, preference = policy["total"] - reference["total"], self.config.preference
        assert preference is not None  # the preset of this program sets it
        if preference.length_normalised:
            ratios = ratios / policy["tokens"].clamp(min=1)
        return compute_pair_metrics(preference.beta * ratios)
