"""Figures of a step by the source of its rows, `source/<name>/...`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import Config
from hybridrl.data.mixture import COLUMN, source_names

PREFIX = "source/"


class SourceFigures:
    """Of data whose rows are of several sources; of other data there are none, and it is false.

    Args:
        rows: To learn from.
    """

    def __init__(self, config: Config, rows: Batch) -> None:
        self._names = source_names(config.data) if COLUMN in rows.columns else []
        places = {name: place for place, name in enumerate(self._names)}
        of_rows = rows.table.column(COLUMN).to_pylist() if self._names else []
        self._of_rows = np.array([places.get(name, -1) for name in of_rows], np.int64)

    def __bool__(self) -> bool:
        return bool(self._names)

    def of_groups(
        self,
        rows: npt.NDArray[np.int64],
        groups: npt.NDArray[np.int64],
        scores: npt.NDArray[np.float32],
    ) -> dict[str, float]:
        """`groups`, how many prompts a source has in the step, and `zero_variance`, the share of
        them whose samples all have the same score, so that they teach nothing.

        Args:
            rows, groups, scores: Of each sample: the number of its row, its group, its score (NaN:
                dropped).
        """
        found: dict[str, float] = {}
        if not self._names or not len(rows):
            return found
        known = ~np.isnan(scores)
        rows, groups, scores = rows[known], groups[known], scores[known]
        for place, name in enumerate(self._names):
            mine = self._of_rows[rows] == place
            _, of_group = np.unique(groups[mine], return_inverse=True)
            if not len(of_group):
                continue
            least, most = np.full(of_group.max() + 1, np.inf), np.full(of_group.max() + 1, -np.inf)
            np.minimum.at(least, of_group, scores[mine])
            np.maximum.at(most, of_group, scores[mine])
            found[f"{PREFIX}{name}/groups"] = float(len(least))
            found[f"{PREFIX}{name}/zero_variance"] = float((least == most).mean())
        return found


def scored_figures(total: Mapping[str, Any]) -> dict[str, float]:
    """`reward/mean`, `accuracy` and `response/length_mean` of each source, from what the reward
    workers added up."""
    ends = "/count"
    names = [
        name.removeprefix(PREFIX).removesuffix(ends)
        for name in total
        if name.startswith(PREFIX) and name.endswith(ends)
    ]
    found = {}
    for name in names:
        begin = f"{PREFIX}{name}"
        if count := total[f"{begin}/count"]:
            found[f"{begin}/reward/mean"] = total[f"{begin}/sum"] / count
            found[f"{begin}/accuracy"] = total[f"{begin}/correct"] / count
        if samples := total[f"{begin}/samples"]:
            found[f"{begin}/response/length_mean"] = total[f"{begin}/tokens"] / samples
    return found
