"""The shuffling error: how much less a step's rows are like the whole data than rows that are drawn
at random."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import Batch
from hybridrl.data.samplers.difficulty_columns import find_difficulty_columns, rank_values

_LENGTH = "length"


class ShuffleError:
    """The shuffling error of steps, in each trait of rows: their source, difficulty and length.

    It is the total variation distance of the step's distribution over the bins of a trait from that
    of all rows, less the distance that is expected of as many rows drawn at random, since a step of
    few rows is never like the whole. Steps of a random order have an error of 0 on average.
    """

    def __init__(self, prompts: Batch) -> None:
        sized = prompts.with_columns({_LENGTH: prompts.lengths("prompt_ids")})
        names = [*(["source"] if "source" in prompts.columns else []), _LENGTH]
        names += find_difficulty_columns(prompts, None)
        self.bins = {name: rank_values(sized, name) + 1 for name in names}  # 0: unknown

    def of_steps(self, steps: npt.NDArray[np.int64]) -> Mapping[str, npt.NDArray[np.float64]]:
        """Compute the error of each step in each trait.

        Args:
            steps: Row numbers, `[steps, rows of a step]`.
        """
        found, (number, size) = {}, steps.shape
        for trait, bins in self.bins.items():
            of_all = np.bincount(bins)
            places = bins[steps] + len(of_all) * np.arange(number)[:, None]
            counts = np.bincount(places.reshape(-1), minlength=number * len(of_all))
            apart = np.abs(counts.reshape(number, -1) / size - of_all / len(bins)).sum(1) / 2
            found[trait] = apart - _expected_distance(of_all, size)
        return found

    def mean(self, steps: npt.NDArray[np.int64]) -> float:
        """Compute the mean error of steps, in the trait that has most."""
        return max(float(errors.mean()) for errors in self.of_steps(steps).values())


def _expected_distance(of_all: npt.NDArray[np.int64], size: int) -> float:
    """Return the mean total variation distance of so many rows, drawn at random, from all rows, of
    which so many are in each bin."""
    from scipy.stats import hypergeom  # takes a second to import

    rows = int(of_all.sum())
    counts = np.arange(min(size, rows) + 1)
    chances = hypergeom.pmf(counts, rows, of_all[:, None], counts[-1])
    return float((chances * np.abs(counts / counts[-1] - of_all[:, None] / rows)).sum() / 2)
