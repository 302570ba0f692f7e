"""What a run keeps of the samples of its steps, and shows of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hybridrl.algorithms import Segments
from hybridrl.batch.arrow_columns import Ragged
from hybridrl.batch.batch import LIBRARY_PREFIXES, Batch
from hybridrl.batch.outcomes import OUTCOMES
from hybridrl.console.run_view import StepView
from hybridrl.console.sample_table_text import Completion
from hybridrl.controller import BatchRef
from hybridrl.trainers.reward_shaper import SHAPED

if TYPE_CHECKING:
    from hybridrl.job.job import Job

TEXTS = (
    *("group_id", "prompt", "answer", "response", "scores", OUTCOMES, SHAPED, "costs"),
    *("advantages", "finish_reason", "policy_version"),
    *("episode", "branch", "turns", "turn_rewards"),
)
TOKENS = (
    *("group_id", "prompt_ids", "response_ids", "response_mask", "scores", SHAPED, "advantages"),
    *("rollout_log_probs", "log_probs", "ref_log_probs", "values", "returns"),
    *("episode", "branch", "turn", "turn_rewards"),
)
SAMPLES_WITH_TOKENS = 64
"""Of a step: a table of all tokens would grow with the batch, and a person looks at a few."""


class KeptSamples:
    """Those of a job; see `observe`."""

    def __init__(self, job: Job, view: StepView) -> None:
        self._job, self._view = job, view

    def keep(self, step: int, batch: BatchRef, metrics: Mapping[str, float]) -> None:
        """Writes the samples of a step, and shows those of its first prompt, as often as is asked.

        Args:
            metrics: Of the step: they tell which columns rewards have.
        """
        observe = self._job.config.observe
        rewards = tuple(name for name in metrics if name.startswith(LIBRARY_PREFIXES))
        if observe.samples_every and (step == 1 or step % observe.samples_every == 0):
            self._job.directory.write_samples(
                step,
                self._with_texts(batch, (*TEXTS, *rewards)).table,
                batch.take(range(min(len(batch), SAMPLES_WITH_TOKENS)))
                .collect(TOKENS, partial=True)
                .table,
            )
        if observe.show_every and (step == 1 or step % observe.show_every == 0):
            most = min(len(batch), self._job.config.rollout.samples_per_prompt)
            rows = self._with_texts(batch.take(range(most)), (*TEXTS, *rewards)).to_pylist()
            first = rows[0].get("group_id")
            shown = [row for row in rows if row.get("group_id") == first]
            prompt = rows[0].get("prompt", "")
            self._view.samples(prompt, [_completion(row) for row in shown])

    def _with_texts(self, batch: BatchRef, kept: tuple[str, ...]) -> Batch:
        """Those of these columns that there are, `tokens` and `advantage` of what was sampled, and
        the responses as texts, which a reward has made of them if the program asked one; of
        episodes of several rows, the last only."""
        rows = of_sampled(batch.collect((*kept, "response_mask"), partial=True))
        is_made = "response" in rows and "branch" not in rows
        if is_made or not batch.columns.may_have("response_ids"):
            return rows
        ids = batch.collect(["response_ids"])["response_ids"].rows()
        texts = self._job.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return rows.with_columns({"response": texts})


def of_sampled(rows: Batch) -> Batch:
    """Return the rows with the numbers of `tokens` that the model sampled and the mean `advantage`
    over those, in place of the mask. A dropped sample has no mask left, and counts whole."""
    if "response_mask" not in rows:
        return rows
    mask, bounds = rows.ragged("response_mask")
    segments = Segments.from_cu_seqlens(bounds, mask.bool())
    sampled = segments.lengths
    found = {"tokens": torch.where(sampled > 0, sampled, bounds.diff())}
    if "advantages" in rows:
        given = rows["advantages"]  # of tokens, or one of each sample
        is_of_tokens = isinstance(given, Ragged)
        # NaN where there are no tokens to learn from.
        found["advantage"] = segments.sum(given.values) / sampled if is_of_tokens else given
    kept = rows.select([name for name in rows.columns if name != "response_mask"])
    return kept.with_columns(found)


def _completion(row: Mapping[str, Any]) -> Completion:
    advantage = row.get("advantage")
    return Completion(
        row.get("response", ""),
        row.get("scores", math.nan),
        {
            name.partition("/")[2]: math.nan if value is None else value
            for name, value in row.items()
            if name.startswith(LIBRARY_PREFIXES)
        },
        None if advantage is None or math.isnan(advantage) else advantage,
    )
