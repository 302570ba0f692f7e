"""Metrics of held-out data: accuracy of responses, loss of reference responses, accuracy on
pairs."""

from __future__ import annotations

import math
from functools import partial

import torch

from hybridrl.batch.batch import OUTCOMES, SOURCE_COLUMN, Batch, is_right, outcomes_of
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, WorkerGroup
from hybridrl.data.mixture import list_source_names
from hybridrl.evaluation.scored_samples import ScoredSamplesRef, sample_and_score
from hybridrl.rollout import SamplingSettings


def evaluate_responses(
    actor: WorkerGroup,
    reward: WorkerGroup,
    prompts: BatchRef,
    sampling: SamplingSettings,
    config: Config,
) -> tuple[dict[str, float], list[ScoredSamplesRef]]:
    """`accuracy`: the share of greedy responses that are right.

    NaN if none of them could be scored; else one that could not is wrong. With `eval.samples` = k
    above 1 also `eval/mean@k` and `eval/pass@k`, of k samples drawn as in training: the share that
    is right, and the share of prompts with a right one. With `eval.by_column` the same figures for
    each value of that column, as `accuracy/<value>`, which is NaN if none of its rows was scored.
    Also returns the samples.
    """
    by = [config.eval.by_column] if config.eval.by_column else []
    if not by and list_source_names(config.data):
        by = [SOURCE_COLUMN]
    drawn: list[ScoredSamplesRef] = []

    def correct(
        how: SamplingSettings, samples: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
        drawn.append(sample_and_score(actor, reward, prompts, how, samples))
        found = drawn[-1].rows.collect(["scores", OUTCOMES, *by], partial=True)
        sources = [str(value) for value in found.table.column(by[0]).to_pylist()] if by else []
        outcomes = outcomes_of(found)
        right = is_right(outcomes, config.reward.correct_at).double()
        return right, ~outcomes.isnan(), sources

    greedy, known, sources = correct(sampling.greedy())
    figures = _average_by_source("accuracy", greedy, known, sources)
    if (k := config.eval.samples) > 1:
        right, known, _ = correct(sampling, k)
        right, known = right.view(-1, k), known.view(-1, k).any(1)
        figures |= _average_by_source(f"eval/mean@{k}", right.mean(1), known, sources)
        figures |= _average_by_source(f"eval/pass@{k}", right.amax(1), known, sources)
    return figures, drawn


def sum_token_column(batch: Batch, column: str) -> Batch:
    """Return for each row the `total` of a token column and the number of `tokens`, both under the
    response mask."""
    values = batch.padded(column)[0]
    mask = batch.padded("response_mask")[0].bool()
    return Batch.from_columns(
        {"total": torch.where(mask, values, 0.0).sum(1), "tokens": mask.sum(1)}
    )


def collect_token_sums(batch: BatchRef, column: str) -> Batch:
    """Bring what `sum_token_column` returns to the driver."""
    summed = batch.apply(partial(sum_token_column, column=column), [column, "response_mask"])
    return summed.collect()


def compute_pair_metrics(scores: torch.Tensor) -> dict[str, float]:
    """Return how often the chosen response of a pair scores more than the rejected one (a tie
    counts half), and by how much on average. `scores` is `[rows]`, the chosen response of each pair
    before the rejected one."""
    margin = scores[0::2] - scores[1::2]
    return {
        "eval/pair_accuracy": float((margin.sign() + 1).mean() / 2),
        "eval/pair_margin": float(margin.mean()),
    }


def compute_label_metrics(rewards: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Return how often a good response is rewarded more than a bad one (a tie counts half), and by
    how much on average; NaN if there are only good ones, or only bad ones.

    Args:
        rewards, labels: `[rows]`; a label is 1 for a good response, else 0.
    """
    good, bad = rewards[labels > 0.5], rewards[labels <= 0.5]
    ahead = (good.unsqueeze(1) - bad).sign()
    return {
        "eval/label_accuracy": float((ahead + 1).mean() / 2),
        "eval/label_margin": float(good.mean() - bad.mean()),
    }


def _average_by_source(
    name: str, values: torch.Tensor, known: torch.Tensor, sources: list[str]
) -> dict[str, float]:
    """Return the mean over all rows, and over the rows of each source; NaN where none of them is
    known."""
    of = {name: torch.ones_like(known)}
    for source in sorted(set(sources)):
        of[f"{name}/{source}"] = torch.tensor([s == source for s in sources])
    return {
        figure: float(values[rows].mean()) if known[rows].any() else math.nan
        for figure, rows in of.items()
    }
