"""The sampler `difficulty`: a curriculum that raises the level when the present one is mastered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import Batch, is_right
from hybridrl.config.schema import Config
from hybridrl.data.samplers.difficulty_columns import find_difficulty_columns, rank_values
from hybridrl.errors import ConfigError


class DifficultySampler:
    """A curriculum sampler. A row's level is the sum of the ranks of its difficulty columns; the
    present level rises when enough of its samples are correct and falls when few are.

    Args:
        columns: That say how hard rows are, higher is harder; None: those that begin with
            `difficulty_`.
        raise_at, lower_at: Pass rates of the present level from which it rises, and below which it
            falls.
        samples: How many of them it takes to know.
        review: The share of rows from lower levels.
    """

    def __init__(
        self,
        rows: Batch,
        seed: int,
        config: Config,
        *,
        columns: Sequence[str] | str | None = None,
        raise_at: float = 0.8,
        lower_at: float = 0.2,
        samples: int = 128,
        review: float = 0.2,
    ) -> None:
        if not 0 <= lower_at < raise_at <= 1:
            raise ConfigError(
                f"data.sampler_options.lower_at={lower_at} and raise_at={raise_at}: must be pass "
                "rates from 0 to 1, the first one less than the other."
            )
        if not 0 <= review < 1 or samples < 1:
            raise ConfigError(
                f"data.sampler_options.review={review} must be a share below 1, and samples="
                f"{samples} 1 or more."
            )
        names = find_difficulty_columns(rows, columns)
        if not names:
            raise ConfigError(
                "data.sampler=difficulty needs columns that say how hard a row is, and the data "
                f"has none that begins with `difficulty_`; it has {', '.join(rows.columns)}. Name "
                "them: data.sampler_options.columns=[level]."
            )
        # A column that a row has not says nothing against it: -1 counts as the lowest.
        added = sum(np.maximum(rank_values(rows, name), 0) for name in names)
        self._level = np.unique(added, return_inverse=True)[1].reshape(-1)
        self._top = int(self._level.max(initial=0))
        self._raise_at, self._lower_at = raise_at, lower_at
        self._samples, self._review = samples, review
        self._correct_at = config.reward.correct_at
        self._random = np.random.default_rng([seed, 2])
        self.level = 0
        self._right = self._known = 0

    def draw(self, number: int) -> npt.NDArray[np.int64]:
        below = np.flatnonzero(self._level < self.level)
        reviewed = int(self._random.binomial(number, self._review)) if len(below) else 0
        present = np.flatnonzero(self._level == self.level)
        return np.concatenate([self._take(present, number - reviewed), self._take(below, reviewed)])

    def update(self, rows: npt.NDArray[np.int64], scores: npt.NDArray[np.float32]) -> None:
        of_level = scores[(self._level[rows] == self.level) & ~np.isnan(scores)]
        self._right += int(is_right(of_level, self._correct_at).sum())
        self._known += len(of_level)
        if self._known < self._samples:
            return
        rate = self._right / self._known
        step = int(rate >= self._raise_at) - int(rate < self._lower_at)
        self.level = min(max(self.level + step, 0), self._top)
        self._right = self._known = 0

    def state(self) -> dict[str, Any]:
        return {
            "random": self._random.bit_generator.state,
            "level": self.level,
            "right": self._right,
            "known": self._known,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._random.bit_generator.state = state["random"]
        self.level = min(int(state["level"]), self._top)
        self._right, self._known = int(state["right"]), int(state["known"])

    def _take(self, rows: npt.NDArray[np.int64], number: int) -> npt.NDArray[np.int64]:
        """Draw rows so that none repeats before all have been drawn."""
        rounds = -(-number // max(1, len(rows)))
        drawn = [self._random.permutation(rows) for _ in range(rounds)]
        return np.concatenate(drawn)[:number] if drawn else np.empty(0, np.int64)
