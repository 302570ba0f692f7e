"""Playing, PlaysEpisodes: episodes of one generation, as they finish."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import Batch
from hybridrl.rollout.around import AroundEngine
from hybridrl.rollout.rollout_engine import Sampling, row_seeds


class Playing(ABC):
    """The episodes of one generation on one replica: what `SampleStream` is for single turns."""

    @abstractmethod
    def take(
        self, least: int, refresh: Callable[[], int] | None = None
    ) -> tuple[Batch, npt.NDArray[np.int64]]:
        """At least so many episodes, or all that are left, in the order in which they finished.

        Args:
            refresh: Called between two polls of the engine: it may give it new weights, and says
                which version it has.

        Returns:
            The columns of `episode_batch`, and the rows' numbers in the batch that `begin` was
            given.
        """

    @abstractmethod
    def close(self) -> None:
        """Drops what is still under way."""


class PlaysEpisodes(AroundEngine):
    """A rollout engine whose samples are episodes, around one that generates their turns."""

    @abstractmethod
    def begin(
        self, batch: Batch, sampling: Sampling, seeds: Sequence[int], version: int
    ) -> Playing:
        """Begins an episode for each row; `take` gives them.

        Args:
            seeds: Of each row.
            version: Of the weights that the engine has.
        """

    def generate(self, batch: Batch, sampling: Sampling, seed: int | Sequence[int]) -> Batch:
        """Plays the episodes of all rows to their end; the columns are those of `episode_batch`,
        but for `token_versions`."""
        playing = self.begin(batch, sampling, row_seeds(seed, len(batch)), 0)
        try:
            samples, rows = playing.take(len(batch))
        finally:
            playing.close()
        return without_versions(samples.take(np.argsort(rows)))

    def notices(self) -> list[str]:
        """What is to be said of episodes that failed since this was asked last, for people."""
        return []


def without_versions(samples: Batch) -> Batch:
    """Samples of weights that did not change while they were made."""
    return samples.select([n for n in samples.columns if not n.endswith("token_versions")])
