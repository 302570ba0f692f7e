"""Evaluation metrics: a value for each prompt, whose mean is the metric.

pass@k is the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, equation 1), maj@k the
self-consistency of Wang et al. 2022 (arXiv:2203.11171).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridrl.evaluation.eval_sets import EvalMetric
from hybridrl.evaluation.sample_table import SampleTable

FloatArray = npt.NDArray[np.float64]


def compute_metric(samples: SampleTable, metric: EvalMetric) -> FloatArray | None:
    """Compute a metric for each prompt: `[prompts]`, NaN where unknown; None if these samples do
    not determine it.

    Samples without a score are wrong answers, and count in no mean score. If none has one, nothing
    is known of what is right.
    """
    answers = samples.sampled if samples.sampled is not None else samples.greedy
    answers = samples.greedy if metric.kind == "accuracy" else answers
    if answers is None or metric.k > answers.correct.shape[1]:
        return None
    values = {"score": answers.scores, "length": answers.tokens, "truncated": answers.truncated}
    if metric.kind in values:
        return _nan_mean(values[metric.kind])
    if np.isnan(answers.scores).all():
        return np.full(len(answers.scores), np.nan)
    if metric.kind == "pass":
        return pass_at_k(answers.correct.sum(1), answers.correct.shape[1], metric.k)
    if metric.kind == "maj":
        return majority_at_k(answers.extracted, answers.correct, metric.k)
    shares: FloatArray = answers.correct.mean(1, dtype=np.float64)
    return shares


def pass_at_k(correct: npt.NDArray[Any], samples: int, k: int) -> FloatArray:
    """Compute the probability that at least one of k samples, drawn without replacement, is
    correct: 1 - C(n - c, k) / C(n, k).

    Args:
        correct: `[prompts]`, how many of its samples are right: c.
        samples: Of each prompt: n, at least k.
    """
    wrong = samples - np.asarray(correct, np.float64)[:, None]
    drawn = np.arange(k)
    # C(n - c, k) / C(n, k) as a product of k factors; 0 where fewer than k samples are wrong.
    none: FloatArray = np.prod(np.maximum(wrong - drawn, 0.0) / (samples - drawn), axis=1)
    return 1.0 - none


def majority_at_k(
    extracted: Sequence[Sequence[str | None]], correct: npt.NDArray[np.bool_], k: int
) -> FloatArray:
    """Compute how often the majority of k answers is correct, averaged over groups of k
    neighbouring samples.

    Of equally frequent answers one is drawn: the value is the chance that it is right. Samples that
    give no answer do not vote. An answer is right as far as the samples that give it are.
    """
    groups = correct.shape[1] // k
    found: FloatArray = np.zeros(len(correct))
    for row, answers in enumerate(extracted):
        for first in range(0, groups * k, k):
            votes = range(first, first + k)
            found[row] += _majority_score(
                [answers[v] for v in votes], correct[row, first : first + k]
            )
    found /= groups
    return found


def _majority_score(answers: Sequence[str | None], correct: npt.NDArray[np.bool_]) -> float:
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == most]
    is_right = [correct[[one == answer for one in answers]].mean() for answer in winners]
    return float(np.mean(is_right))


def _nan_mean(values: FloatArray) -> FloatArray:
    known = ~np.isnan(values)
    counts = known.sum(1)
    sums = np.where(known, values, 0.0).sum(1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
