"""DPO and its relatives: learns from preference pairs directly, without a reward model and without
generating.

Rafailov et al. 2023, arXiv:2305.18290; `preference.loss` chooses another loss, which may need no
reference model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from hybridrl.algorithms import PreferenceObjective
from hybridrl.config.effective_settings import trainer_settings
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, Handle, WorkerGroup
from hybridrl.evaluation.held_out_metrics import collect_token_sums, compute_pair_metrics
from hybridrl.trainers import trainer as base
from hybridrl.trainers.objectives import build_preference_objective, list_reference_roles
from hybridrl.trainers.role_spec import LEARNER_ROLE, RoleSpec, standard_roles
from hybridrl.trainers.trainer import SAMPLE_COLUMNS, UPDATE_COLUMNS, StepResult
from hybridrl.trainers.update_columns import loss_weights


class Trainer(base.Trainer):
    """The trainer of all losses of pairs."""

    USES = trainer_settings("dpo")
    DATA = "pairs"

    @staticmethod
    def roles(config: Config) -> Mapping[str, RoleSpec]:
        return {"actor": LEARNER_ROLE, **standard_roles(*list_reference_roles(config))}

    @staticmethod
    def objective(config: Config) -> PreferenceObjective:
        return build_preference_objective(config)

    def step(self) -> StepResult:
        batch, update = update_on_pairs(self.groups, self.next_batch())
        return StepResult(batch, [update])

    def evaluate(self, held_out: BatchRef) -> dict[str, float]:
        """`eval/pair_accuracy` and `eval/pair_margin` of the implicit reward that is trained."""
        sample = held_out.select(*SAMPLE_COLUMNS)
        batch = held_out | self.groups["actor"].compute_log_prob(sample)
        policy = collect_token_sums(batch, "log_probs")
        totals = policy["total"]
        if "reference" in self.groups:
            batch |= self.groups["reference"].compute_ref_log_prob(sample)
            totals = totals - collect_token_sums(batch, "ref_log_probs")["total"]
        objective = build_preference_objective(self.config)
        scores = objective.compute_scores(totals, policy["tokens"])
        return compute_pair_metrics(objective.reward_scale * scores)


def update_on_pairs(groups: Mapping[str, WorkerGroup], pairs: BatchRef) -> tuple[BatchRef, Handle]:
    """Update the actor on pairs of rows, the chosen one first; return them with the columns that
    this needed, and a handle on the metrics."""
    columns = list(UPDATE_COLUMNS)
    weigh = partial(loss_weights, mode="seq-mean-token-mean")
    pairs |= pairs.apply(weigh, ["response_mask"], makes=["loss_weights"])
    if "reference" in groups:
        pairs |= groups["reference"].compute_ref_log_prob(pairs.select(*SAMPLE_COLUMNS))
        columns.append("ref_log_probs")
    return pairs, groups["actor"].update_preference(pairs.select(*columns))
