"""The sampler `pass_rate`: prefers rows that are answered correctly sometimes, not always and not
never."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import Batch, is_right
from hybridrl.config.schema import Config
from hybridrl.data.samplers.difficulty_columns import assign_buckets, find_difficulty_columns
from hybridrl.errors import ConfigError

BUCKET_PRIOR_SAMPLES = 8.0
"""So many samples is worth, to a row, what is known of the rows of its source and difficulty."""
MIN_BETA_PARAMETER = 1e-3
"""Of the parameters of a beta distribution."""


class PassRateSampler:
    """A sampler that prefers rows with a pass rate near one half: groups that are all correct or
    all wrong have no advantage (Bae et al. 2025, arXiv:2504.03380).

    What is believed of a row is a beta distribution: of the samples of rows of its source and
    difficulty, and of its own. A draw takes a pass rate from each row's distribution (Thompson
    sampling), so that what is little known is tried, and prefers rows whose rate is in the band.
    Old samples count less, because the policy learns.

    Args:
        low, high: The band of pass rates.
        explore: The weight of a row outside of it, where one inside has 1.
        memory: So many of the newest samples count for a source and difficulty.
        half_life: After so many steps a row's own samples count half.
        columns: That say how hard rows are; None: those that begin with `difficulty_`.
    """

    def __init__(
        self,
        rows: Batch,
        seed: int,
        config: Config,
        *,
        low: float = 0.2,
        high: float = 0.8,
        explore: float = 0.05,
        memory: float = 128.0,
        half_life: float = 20.0,
        columns: Sequence[str] | str | None = None,
    ) -> None:
        if not 0 <= low < high <= 1:
            raise ConfigError(
                f"data.sampler_options.low={low} and high={high}: must be pass rates from 0 to 1, "
                "the first one less than the other."
            )
        for name, value in (("explore", explore), ("memory", memory), ("half_life", half_life)):
            if not value > 0:
                raise ConfigError(f"data.sampler_options.{name}={value}: must be more than 0.")
        self._low, self._high, self._explore = low, high, explore
        self._memory, self._half_life = memory, half_life
        self._correct_at = config.reward.correct_at
        self._random = np.random.default_rng([seed, 1])
        self._bucket = assign_buckets(rows, find_difficulty_columns(rows, columns))
        self._of_buckets = np.zeros((int(self._bucket.max(initial=0)) + 1, 2))  # right, wrong
        self._of_rows = np.zeros((len(rows), 2))
        self._seen = np.zeros(len(rows), np.int64)
        self._step = 0

    def draw(self, number: int) -> npt.NDArray[np.int64]:
        """Draw rows without repeats, unless more are asked for than exist."""
        self._step += 1
        found: list[npt.NDArray[np.int64]] = []
        while (left := number - sum(map(len, found))) > 0:
            rates = self._believed()
            inside = (rates >= self._low) & (rates <= self._high)
            weights = np.where(inside, 1.0, self._explore)
            # The largest of these are a draw by weight, without putting back (Efraimidis and
            # Spirakis 2006).
            keys = np.log1p(-self._random.random(len(weights))) / weights  # of 1 - [0, 1)
            found.append(np.argsort(-keys, kind="stable")[:left])
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def update(self, rows: npt.NDArray[np.int64], scores: npt.NDArray[np.float32]) -> None:
        known = ~np.isnan(scores)
        rows, right = rows[known], is_right(scores[known], self._correct_at)
        outcomes = np.stack([right, ~right], axis=1)
        np.add.at(self._of_buckets, self._bucket[rows], outcomes)
        totals = self._of_buckets.sum(1, keepdims=True)
        self._of_buckets *= self._memory / np.maximum(totals, self._memory)
        seen = np.unique(rows)
        self._of_rows[seen] *= self._remembered(seen)[:, None]
        self._seen[seen] = self._step
        np.add.at(self._of_rows, rows, outcomes)

    def state(self) -> dict[str, Any]:
        seen = np.flatnonzero(self._of_rows.any(1))
        return {
            "random": self._random.bit_generator.state,
            "step": self._step,
            "buckets": self._of_buckets.tolist(),
            "rows": seen.tolist(),
            "counts": self._of_rows[seen].tolist(),
            "seen": self._seen[seen].tolist(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._random.bit_generator.state = state["random"]
        self._step = int(state["step"])
        if len(state["buckets"]) == len(self._of_buckets):  # else the data says it otherwise now
            self._of_buckets = np.array(state["buckets"], float).reshape(-1, 2)
        rows = np.array(state["rows"], np.int64)
        self._of_rows[:], self._seen[:] = 0.0, 0
        self._of_rows[rows] = np.array(state["counts"], float).reshape(-1, 2)
        self._seen[rows] = state["seen"]

    def _believed(self) -> npt.NDArray[np.float64]:
        """Sample a pass rate for each row from its posterior."""
        right, wrong = self._of_buckets.T + 1.0
        shared = self._random.beta(right, wrong)[self._bucket]
        own = self._of_rows * self._remembered(np.arange(len(self._seen)))[:, None]
        right = BUCKET_PRIOR_SAMPLES * shared + own[:, 0]
        wrong = BUCKET_PRIOR_SAMPLES * (1 - shared) + own[:, 1]
        right, wrong = (np.maximum(one, MIN_BETA_PARAMETER) for one in (right, wrong))
        drawn: npt.NDArray[np.float64] = self._random.beta(right, wrong)
        return drawn

    def _remembered(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the weight of earlier samples of these rows, which halves every `half_life`
        steps."""
        weights: npt.NDArray[np.float64] = 0.5 ** (
            (self._step - self._seen[rows]) / self._half_life
        )
        return weights
