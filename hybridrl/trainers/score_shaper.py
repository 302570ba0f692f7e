"""Reward shaping before the update: shorter correct responses earn more, and each source of prompts
is normalized by itself.

What was measured stays as it is: figures, evaluations and the sampler of the data know the column
`scores`; what is learned from is the column `SHAPED`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms import relative_length_reward
from hybridrl.batch.batch import MASKS, OUTCOMES, Batch, is_right, outcomes_of, sampled_tokens
from hybridrl.config.schema import Config, RewardConfig
from hybridrl.controller import BatchRef
from hybridrl.trainers.update_columns import SHAPED, learned_scores


class ScoreMoments(NamedTuple):
    """Running moments of values: number, mean, and sum of squared deviations from the mean."""

    number: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> ScoreMoments:
        """Compute the moments of the values that are not NaN."""
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return cls()
        mean = math.fsum(known) / len(known)
        return cls(len(known), mean, math.fsum((value - mean) ** 2 for value in known))

    def with_those(self, other: ScoreMoments) -> ScoreMoments:
        """Merge with other moments (Chan et al. 1979)."""
        number = self.number + other.number
        if not number:
            return self
        gap = other.mean - self.mean
        return ScoreMoments(
            number,
            self.mean + gap * other.number / number,
            self.squares + other.squares + gap * gap * self.number * other.number / number,
        )

    @property
    def std(self) -> float:
        """The unbiased standard deviation; 1 where it is undefined or zero."""
        deviation = math.sqrt(self.squares / (self.number - 1)) if self.number > 1 else 0.0
        return deviation if deviation > 1e-6 else 1.0


class ScoreShaper:
    """The reward shaping of a run, with the moments of each source's scores.

    Args:
        config: Of the job.

    Attributes:
        changes: Whether scores become others.
    """

    def __init__(self, config: Config) -> None:
        self._reward, self.changes = config.reward, shapes(config.reward)
        self._before = SHAPED if config.reward.shorter else "scores"  # of normalising
        self._known: dict[str, ScoreMoments] = {}
        self._under_way: list[BatchRef] = []

    def shaped(self, scored: BatchRef) -> BatchRef:
        """The column `SHAPED`, and no other: the scores as they are learned from.

        Args:
            scored: Samples with their `scores`.
        """
        reward, shaped = self._reward, scored
        if reward.shorter:
            shorten = partial(add_brevity_reward, weight=reward.shorter, at=reward.correct_at)
            further = sorted(scored.columns.certain.intersection((OUTCOMES, *MASKS[1:])))
            columns = ["scores", "group_id", "response_mask", *further]
            shaped = scored.apply(shorten, columns, makes=[SHAPED])
        if by := reward.normalise_by:
            self._learn()
            known = (scored | shaped).select(self._before, by)
            self._under_way.append(known)
            scale = partial(normalize_scores_by_source, by=by, known=dict(self._known))
            shaped = known.apply(scale, [self._before, by], makes=[SHAPED])
        return shaped

    def state(self) -> dict[str, Any]:
        self._learn()
        return {source: list(moments) for source, moments in self._known.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._under_way.clear()
        self._known = {
            source: ScoreMoments(int(count), mean, squares)
            for source, (count, mean, squares) in state.items()
        }

    def _learn(self) -> None:
        """Merge the scores of earlier steps into the moments, after waiting for them."""
        by, under_way, self._under_way = str(self._reward.normalise_by), self._under_way, []
        for scored in under_way:
            moments = compute_source_moments(scored.collect([self._before, by]), by)
            for source, found in moments.items():
                self._known[source] = self._known.get(source, ScoreMoments()).with_those(found)


def add_brevity_reward(batch: Batch, weight: float, at: float) -> Batch:
    """`SHAPED`: scores with the reward of sampling fewer tokens than others of the group. Groups do
    not depend on each other.

    Args:
        weight: Of that reward.
        at: A sample is right from this outcome on.
    """
    scores: Tensor = batch["scores"]
    right, lengths = is_right(outcomes_of(batch), at), sampled_tokens(batch)
    groups = batch["group_id"].clone()
    groups[scores.isnan()] = -1 - torch.arange(len(groups))[scores.isnan()]  # compared with nothing
    return Batch.from_columns(
        {SHAPED: scores + weight * relative_length_reward(lengths, right, groups)}
    )


def normalize_scores_by_source(batch: Batch, by: str, known: Mapping[str, ScoreMoments]) -> Batch:
    """`SHAPED`: scores minus the mean of their source, over its standard deviation, of these rows
    and of what is known from before. They depend on all rows of the source.

    Args:
        by: The column that says the source.
    """
    both = {
        source: known.get(source, ScoreMoments()).with_those(found)
        for source, found in compute_source_moments(batch, by).items()
    }
    scores = [
        (score - both[source].mean) / both[source].std
        for score, source in _pair_with_sources(batch, by)
    ]
    return Batch.from_columns({SHAPED: torch.tensor(scores, dtype=torch.float32)})


def compute_source_moments(batch: Batch, by: str) -> dict[str, ScoreMoments]:
    """Moments of the scores of each source."""
    found: dict[str, list[float]] = {}
    for score, source in _pair_with_sources(batch, by):
        found.setdefault(source, []).append(score)
    return {source: ScoreMoments.of(scores) for source, scores in found.items()}


def _pair_with_sources(batch: Batch, by: str) -> Iterator[tuple[float, str]]:
    sources = map(str, batch.table.column(by).to_pylist())
    return zip(learned_scores(batch).tolist(), sources, strict=True)


def shapes(reward: RewardConfig) -> bool:
    """Return whether the learned scores differ from the given ones."""
    return bool(reward.shorter or reward.normalise_by)
