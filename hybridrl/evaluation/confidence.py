"""Confidence intervals of metrics, and tests of whether two differ significantly.

Prompts are what is drawn at random: all samples of a prompt count as one. Of values that are yes or
no the interval is Wilson's (1927) and two evaluations on the same prompts are compared by McNemar's
test (1947), exactly; of others the interval is that of a bootstrap over prompts (Efron 1979), and
the test one over the differences of each prompt.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridrl.evaluation.eval_metrics import FloatArray

_Z_95 = 1.959964
"""Of a normal distribution, around its mean, within which are 95 in 100."""
_BOOTSTRAP_DRAWS = 2000
"""Of a bootstrap."""
_MAX_NUMBERS_DRAWN = 2**22
"""Numbers of a bootstrap that are drawn at once."""


class MetricEstimate(NamedTuple):
    """A metric with its confidence interval.

    Attributes:
        value: The mean over the prompts of which something is known.
        standard_error: Of the mean; NaN for one prompt.
        low, high: Ends of the interval of 95%.
        prompts: How many there are.
    """

    value: float
    standard_error: float
    low: float
    high: float
    prompts: int


class MetricDifference(NamedTuple):
    """A difference between a metric and its baseline, with its p-value.

    Attributes:
        value: How much more it is.
        low, high: Ends of the interval of 95%; NaN if one prompt is all that there is.
        p: How likely chance alone makes them differ as much.
        test: How that was found out.
    """

    value: float
    low: float
    high: float
    p: float
    test: str


def estimate_mean(values: FloatArray) -> MetricEstimate:
    """Estimate the mean of `[prompts]` values; NaN is ignored."""
    known = values[~np.isnan(values)]
    number = len(known)
    if not number:
        return MetricEstimate(math.nan, math.nan, math.nan, math.nan, 0)
    mean = float(known.mean())
    error = float(known.std(ddof=1)) / math.sqrt(number) if number > 1 else math.nan
    low, high = (
        _wilson_interval(mean, number)
        if _is_binary(known)
        else _quantile_interval(_bootstrap_means(known))
        if number > 1
        else (math.nan, math.nan)
    )
    return MetricEstimate(mean, error, low, high, number)


def compare_paired(now: FloatArray, then: FloatArray) -> MetricDifference:
    """Compare two evaluations of the same prompts, value by value."""
    both = ~(np.isnan(now) | np.isnan(then))
    now, then = now[both], then[both]
    differences = now - then
    if not len(differences):
        return MetricDifference(math.nan, math.nan, math.nan, math.nan, "none")
    mean, drawn = float(differences.mean()), _bootstrap_means(differences)
    low, high = _quantile_interval(drawn) if len(differences) > 1 else (math.nan, math.nan)
    if _is_binary(now) and _is_binary(then):
        gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
        return MetricDifference(mean, low, high, mcnemar_p_value(gained, lost), "McNemar")
    if not differences.any():
        return MetricDifference(mean, low, high, 1.0, "paired bootstrap")
    # A p of 0 would say that more draws had found nothing, either.
    below, above = (
        ((drawn <= 0).sum() + 1) / (_BOOTSTRAP_DRAWS + 1),
        ((drawn >= 0).sum() + 1) / (_BOOTSTRAP_DRAWS + 1),
    )
    # If all of a few prompts changed the same way, so do all draws, and p would be too small. It is
    # at least that of a fair coin that falls the same way as often as there are changes.
    changed = int(np.count_nonzero(differences))
    p = min(1.0, max(2 * float(min(below, above)), 2.0 ** (1 - changed)))
    return MetricDifference(mean, low, high, p, "paired bootstrap")


def compare_unpaired(now: MetricEstimate, then: MetricEstimate) -> MetricDifference:
    """Compare two evaluations of different prompts, or of which only means are known."""
    difference = now.value - then.value
    error = math.hypot(now.standard_error, then.standard_error)
    low, high = difference - _Z_95 * error, difference + _Z_95 * error
    if not error:  # NaN of a single prompt is passed on
        p = 1.0 if not difference else 0.0
    else:
        p = math.erfc(abs(difference) / error / math.sqrt(2))
    return MetricDifference(difference, low, high, p, "unpaired")


def mcnemar_p_value(gained: int, lost: int) -> float:
    """Return the two-sided exact p-value of McNemar's test: how likely a fair coin is as far from
    even.

    Args:
        gained, lost: Prompts that only the one, and only the other, gets right.
    """
    if not gained + lost:
        return 1.0
    from scipy.stats import binomtest  # takes a second to import

    return float(binomtest(gained, gained + lost).pvalue)


def _is_binary(values: npt.NDArray[Any]) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _wilson_interval(share: float, number: int) -> tuple[float, float]:
    z = _Z_95
    middle = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    half /= 1 + z * z / number
    return max(0.0, middle - half), min(1.0, middle + half)


def _bootstrap_means(values: FloatArray) -> FloatArray:
    """Return the means of bootstrap resamples, drawn with a fixed seed."""
    generator, number = np.random.default_rng(0), len(values)
    at_once = max(1, _MAX_NUMBERS_DRAWN // number)
    parts = [
        values[generator.integers(0, number, (min(at_once, _BOOTSTRAP_DRAWS - done), number))].mean(
            1
        )
        for done in range(0, _BOOTSTRAP_DRAWS, at_once)
    ]
    return np.concatenate(parts)


def _quantile_interval(drawn: FloatArray) -> tuple[float, float]:
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)
