"""Replay: prompts of earlier steps that are learned from again, with the samples they had then."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hybridrl.algorithms import keep_informative
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef
from hybridrl.trainers.reward_shaper import SHAPED, learned_scores


def informative_rows(scores: torch.Tensor, groups: torch.Tensor) -> npt.NDArray[np.int64]:
    """The rows of all prompts whose scores differ, those of dropped samples (NaN) aside."""
    scored = ~torch.isnan(scores)
    informative = keep_informative(scores[scored], groups[scored])
    return np.flatnonzero(torch.isin(groups, groups[scored][informative]))


def most_replayed(config: Config) -> int:
    """So many prompts of earlier steps a step learns from at most."""
    share = config.algorithm.replay_share
    return int(share / (1 - share) * config.data.prompts_per_step + 1e-9)


@dataclass
class _Kept:
    """A step's samples, with their advantages; they stay with the workers that made them.

    Attributes:
        version: Updates that the policy had had when the step began.
        rows: By prompt that teaches something, the rows of its samples; None until it is known.
    """

    batch: BatchRef
    version: int
    rows: list[npt.NDArray[np.int64]] | None = None


class Replay:
    """Keeps the samples of the last steps, and draws whole groups of them, `algorithm.replay_share`
    of what a step learns from at most. The importance of a sample of an older policy is weighed by
    the loss (`algorithm.correction`, else the clipped ratio to the policy that sampled).

    Attributes:
        figures: Of the last draw: how many groups, and how many updates old.
    """

    def __init__(self, config: Config) -> None:
        self._most = most_replayed(config)
        self._age = config.algorithm.replay_age
        self._kept: deque[_Kept] = deque()
        self._random = np.random.default_rng([config.run.seed, 3])
        self.figures: dict[str, float] = {}

    def keep(self, batch: BatchRef, version: int) -> None:
        """Has these samples drawn from in later steps. Nothing is waited for."""
        if self._most:
            self._kept.append(_Kept(batch, version))

    def draw(self, version: int) -> list[BatchRef]:
        """Samples of earlier steps for one that begins after so many updates: none older than
        `algorithm.replay_age` updates, none twice, and none of prompts whose samples all scored
        alike. Waits until those of the step before are scored."""
        while self._kept and version - self._kept[0].version > self._age:
            self._kept.popleft()
        if not self._most:
            return []
        for kept in self._kept:
            if kept.rows is None:
                columns = ["scores", SHAPED, "group_id"]  # a few numbers a sample
                known = kept.batch.collect(columns, partial=True)
                rows = informative_rows(learned_scores(known), known["group_id"])
                groups = known["group_id"].numpy()[rows]
                kept.rows = [rows[groups == group] for group in np.unique(groups)]
        ages = [version - kept.version for kept in self._kept for _ in kept.rows or ()]
        number = min(self._most, len(ages))
        chosen = np.sort(self._random.permutation(len(ages))[:number])
        drawn = [ages[place] for place in chosen]
        self.figures = {"replay/groups": float(number)}
        if drawn:
            self.figures["replay/age_mean"] = float(np.mean(drawn))
            self.figures["replay/age_max"] = float(max(drawn))
        return self._parts(chosen)

    def _parts(self, chosen: npt.NDArray[np.int64]) -> list[BatchRef]:
        """The groups with these places among all that are kept."""
        found, begin = [], 0
        for kept in self._kept:
            groups = kept.rows or []
            mine = chosen[(chosen >= begin) & (chosen < begin + len(groups))] - begin
            begin += len(groups)
            if len(mine):
                found.append(kept.batch.take(np.concatenate([groups[place] for place in mine])))
        return found
