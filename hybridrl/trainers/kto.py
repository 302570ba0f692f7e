"""KTO: learns from single responses that are marked as good or bad, without pairs and without
generating.

Ethayarajh et al. 2024, arXiv:2402.01306.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain

import numpy as np
import torch

from hybridrl.algorithms import UnpairedPreferenceObjective
from hybridrl.batch.batch import Batch
from hybridrl.config.effective_settings import trainer_settings
from hybridrl.config.schema import Config, PreferenceConfig
from hybridrl.controller import BatchRef
from hybridrl.evaluation.held_out_metrics import compute_label_metrics, sum_token_column
from hybridrl.trainers import trainer as base
from hybridrl.trainers.role_spec import LEARNER_ROLE, RoleSpec, standard_roles
from hybridrl.trainers.trainer import SAMPLE_COLUMNS, UPDATE_COLUMNS, StepResult
from hybridrl.trainers.update_columns import loss_weights

_ROW_COLUMNS = (*SAMPLE_COLUMNS, "response_mask")
_RATIO_COLUMNS = ("log_probs", "ref_log_probs", "response_mask")


class Trainer(base.Trainer):
    """The trainer of KTO."""

    USES = trainer_settings("kto")
    DATA = "responses"

    @staticmethod
    def roles(config: Config) -> Mapping[str, RoleSpec]:
        return {"actor": LEARNER_ROLE, **standard_roles("reference")}

    @staticmethod
    def objective(config: Config) -> UnpairedPreferenceObjective:
        settings = config.preference or PreferenceConfig()
        return UnpairedPreferenceObjective(
            settings.beta, settings.desirable_weight, settings.undesirable_weight
        )

    def step(self) -> StepResult:
        weigh = partial(loss_weights, mode="seq-mean-token-mean")
        batch = self.next_batch()
        others = batch.apply(swap_responses, _ROW_COLUMNS, makes=_ROW_COLUMNS)
        batch |= self._scored(others).apply(estimate_divergence, _RATIO_COLUMNS, makes=["kl"])
        batch |= batch.apply(weigh, ["response_mask"], makes=["loss_weights"])
        reference = self.groups["reference"]
        batch |= reference.compute_ref_log_prob(batch.select(*SAMPLE_COLUMNS))
        columns = (*UPDATE_COLUMNS, *UnpairedPreferenceObjective.needs)
        return StepResult(batch, [self.groups["actor"].update_actor(batch.select(*columns))])

    def evaluate(self, held_out: BatchRef) -> dict[str, float]:
        """Return `eval/label_accuracy` and `eval/label_margin` of the held-out responses."""
        scored = self._scored(held_out)
        ratios = scored.apply(sum_log_ratios, _RATIO_COLUMNS, makes=["total"]).collect()["total"]
        beta = (self.config.preference or PreferenceConfig()).beta
        return compute_label_metrics(beta * ratios, held_out.collect(["label"])["label"])

    def _scored(self, rows: BatchRef) -> BatchRef:
        """Return the rows with the log-probabilities of policy and reference."""
        sample = rows.select(*SAMPLE_COLUMNS)
        rows |= self.groups["actor"].compute_log_prob(sample)
        rows |= self.groups["reference"].compute_ref_log_prob(sample)
        return rows


def swap_responses(batch: Batch) -> Batch:
    """Return each prompt with a response to another one, to which the policy has not been held: how
    much likelier it has become says how far the policy is from the reference. It is that of the row
    before where all prompts differ. A prompt keeps a response of its own only where most rows have
    that prompt."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, prompt in enumerate(batch.ragged("prompt_ids").rows()):
        rows.setdefault(tuple(prompt.tolist()), []).append(number)
    by_prompt = np.array([*chain.from_iterable(rows.values())], dtype=np.int64)
    most = max(map(len, rows.values()), default=0)
    sources = np.empty_like(by_prompt)
    sources[by_prompt] = np.roll(by_prompt, most)  # past all rows of a prompt
    before = batch.take(sources)
    return batch.select(["prompt_ids"]) | before.select(list(_ROW_COLUMNS[1:]))


def sum_log_ratios(batch: Batch) -> Batch:
    """Return the `total` log-ratio of policy and reference of each response."""
    policy, reference = (sum_token_column(batch, name)["total"] for name in _RATIO_COLUMNS[:2])
    return Batch.from_columns({"total": policy - reference})


def estimate_divergence(batch: Batch) -> Batch:
    """Return the column `kl`: the mean log-ratio of all rows, or 0 if that is negative."""
    kl = sum_log_ratios(batch)["total"].mean().clamp(min=0.0)
    return Batch.from_columns({"kl": torch.full((len(batch),), float(kl))})
