"""Proposing the next learning rate to try, by Bayesian optimization on its logarithm.

A Gaussian process predicts the value of a rate from those of rates that were tried; proposed is the
one with the lowest confidence bound, mean - kappa x standard deviation. Needs scikit-learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LENGTH_SCALE = 1.0
"""Rates within so many decades have similar values."""
PRIOR_VARIANCE = 0.5
NOISE_VARIANCE = 0.01
"""Of the value of a trial in the stage that is under way."""
STAGE_VARIANCE = 0.1
"""Added for each stage since the trial, for the best rate changes."""
_GRID = 129


class RateTrial(NamedTuple):
    """A learning rate that was tried.

    Attributes:
        place: The logarithm of the rate, to base 10.
        value: 0 for the best rate of its stage, 1 for one that changes nothing, more for worse.
        age: Number of stages since.
    """

    place: float
    value: float
    age: int = 0


def propose_rate(trials: Sequence[RateTrial], lowest: float, highest: float, kappa: float) -> float:
    """Return the logarithm, to base 10, of the rate to try next, between these two; the middle if
    none was tried.

    Args:
        kappa: 0 chooses the rate that is predicted to be best; more explores.
    """
    grid = np.linspace(lowest, highest, _GRID)
    if not trials:
        return float(grid[_GRID // 2])
    mean, deviation = predict_values(trials, grid)
    return float(grid[np.argmin(mean - kappa * deviation)])


def find_lowest_good_rate(
    trials: Sequence[RateTrial], lowest: float, highest: float, most: float
) -> float:
    """Return the logarithm, to base 10, of the lowest rate between these two whose predicted value
    is that of the best one and ``most``, or less."""
    grid = np.linspace(lowest, highest, _GRID)
    mean, _ = predict_values(trials, grid)
    return float(grid[np.argmax(mean <= mean.min() + most)])


def predict_values(
    trials: Sequence[RateTrial], places: Sequence[float] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation of the value at each place. Far from all trials
    the mean is 1: a rate that changes nothing."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern

    kernel = ConstantKernel(PRIOR_VARIANCE) * Matern(LENGTH_SCALE, nu=2.5)
    noise = np.array([NOISE_VARIANCE + STAGE_VARIANCE * trial.age for trial in trials])
    process = GaussianProcessRegressor(kernel, alpha=noise, optimizer=None)
    process.fit([[trial.place] for trial in trials], [trial.value - 1 for trial in trials])
    mean, deviation = process.predict(np.reshape(places, (-1, 1)), return_std=True)
    return mean + 1, deviation
