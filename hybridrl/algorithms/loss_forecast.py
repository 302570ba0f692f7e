"""Forecasting a training loss from the first steps at a learning rate.

AutoLRS (Jin et al. 2021, arXiv:2105.10762): the loss of a constant rate falls about exponentially,
so that a tenth of the steps says where it will be after all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_DROPPED_SHARE = 0.03
"""Of the points, the most that a round of smoothing drops: the worst of the first half."""
_MIN_SMOOTHED = 8
"""Shorter curves are fitted as they are."""
_MAX_KNOTS = 3
_OUTLIER = 5.0
"""Nearer points than so many median distances stay."""
_CANDIDATES = 256
"""Exponents that are tried."""
Curve = npt.NDArray[np.float64]


def forecast_loss(losses: Sequence[float], steps: int, times: Sequence[int] | None = None) -> float:
    """Return the loss after `steps` steps, by the curve `a e^(b t) + c` with b < 0 that is nearest
    to the smoothed losses in squares. Losses are never negative, and neither is c.

    Args:
        losses: At least two finite numbers.
        times: The step of each loss, increasing; None: 0, 1, 2, ...
    """
    at = np.arange(len(losses)) if times is None else np.asarray(times)
    curve = smooth_losses(losses) if times is None else np.asarray(losses, np.float64)
    least, found = np.inf, float(curve[-1])
    for exponent in -np.geomspace(1 / steps, 1.0, _CANDIDATES):
        decay = np.exp(exponent * at)
        spread = decay - decay.mean()
        scale = (spread @ curve) / (spread @ spread)
        limit = curve.mean() - scale * decay.mean()
        if limit < 0:
            scale, limit = (decay @ curve) / (decay @ decay), 0.0
        error = float(((scale * decay + limit - curve) ** 2).sum())
        if error < least * (1 - 1e-9):
            least, found = error, float(scale * np.exp(exponent * steps) + limit)
    return found


def smooth_losses(losses: Sequence[float]) -> Curve:
    """Return the losses on a spline of degree 2 with few knots, fitted again without the points of
    the first half that are furthest from it, since early outliers tilt a forecast most."""
    from scipy.interpolate import LSQUnivariateSpline  # takes a second to import

    values = np.asarray(losses, np.float64)
    count = len(values)
    if count < _MIN_SMOOTHED:
        return values
    at, kept = np.arange(count, dtype=np.float64), np.ones(count, bool)
    knots = np.linspace(0, count - 1, 2 + min(_MAX_KNOTS, count // _MIN_SMOOTHED))[1:-1]
    dropped = max(1, int(_DROPPED_SHARE * count))
    for _ in range(_ROUNDS):
        curve = LSQUnivariateSpline(at[kept], values[kept], knots, k=2)(at)
        distances = np.where(kept, np.abs(values - curve), 0.0)
        limit = _OUTLIER * float(np.median(distances[kept]))
        early = distances[: count // 2]
        worst = np.argsort(early)[-dropped:]
        worst = worst[early[worst] > limit]
        if not len(worst) or kept[: count // 2].sum() - len(worst) < count // 4:
            break
        kept[worst] = False
    return np.asarray(curve)
