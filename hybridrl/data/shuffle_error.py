"""The shuffling error: how much less a step's rows are like the whole data than rows that are drawn
at random, in a trait of rows: their source, difficulty and length."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import Batch
from hybridrl.data.samplers.difficulty_columns import find_difficulty_columns, rank_values

Bins = npt.NDArray[np.int64]
"""The bin of each row's value of a trait, from 0."""


def rank_traits(prompts: Batch) -> list[Bins]:
    """Return the bins of each trait that the rows have."""
    sized = prompts.with_columns({"length": prompts.lengths("prompt_ids")})
    names = ["source", "length", *find_difficulty_columns(prompts, None)]
    known = [name for name in names if name in sized.columns]
    return [rank_values(sized, name) + 1 for name in known]  # 0: unknown


def compute_shuffle_error(bins: Bins, steps: npt.NDArray[np.int64]) -> float:
    """Compute the mean error of steps in one trait.

    It is the total variation distance of a step's distribution over the bins from that of all rows,
    less the distance that is expected of as many rows drawn at random, since a step of few rows is
    never like the whole. Steps of a random order have an error of 0 on average.

    Args:
        steps: Row numbers, `[steps, rows of a step]`.
    """
    from scipy.stats import hypergeom  # takes a second to import

    (number, size), of_all, drawn = steps.shape, np.bincount(bins), np.arange(steps.shape[1] + 1)
    places = bins[steps] + len(of_all) * np.arange(number)[:, None]
    counts = np.bincount(places.reshape(-1), minlength=number * len(of_all)).reshape(number, -1)
    chances = hypergeom.pmf(drawn, len(bins), of_all[:, None], size)
    found = np.abs(counts / size - of_all / len(bins)).sum() / number
    expected = chances * np.abs(drawn / size - of_all[:, None] / len(bins))
    return float(found - expected.sum()) / 2
