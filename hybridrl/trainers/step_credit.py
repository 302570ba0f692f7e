"""What there is to learn from where rewards come step by step (`algorithm.step_credit`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms import Segments, least_of, part_advantages, part_numbers, rewards_at
from hybridrl.algorithms.masking import on_mask
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import AlgorithmConfig

STEPS = ("step_ends", "step_rewards")
"""The columns of steps."""
COMPARED = "group_relative"
"""The estimator that compares steps with steps; others that read rewards of tokens find the steps'
among them."""


class _Steps(NamedTuple):
    """Of the steps of all samples: the tokens up to each one's end, the row that it is of, what it
    is credited with, and what it was rewarded with, each `[steps]`."""

    ends: Tensor
    row: Tensor
    credit: Tensor
    rewards: Tensor


def step_rewards(
    batch: Batch, config: AlgorithmConfig, scores: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """The rewards of steps on the tokens that they end with, `[tokens]`; and what of the scores is
    none of theirs, `[rows]`."""
    return _placed(_steps(batch, config), scores, segments)


def step_advantages(
    batch: Batch, config: AlgorithmConfig, scores: Tensor, segments: Segments
) -> Tensor:
    """Each step compared with the same step of the others of its group; what of a score belongs to
    no step lies on the last token."""
    steps = _steps(batch, config)
    on_steps, rest = _placed(steps, scores, segments)
    rewards = on_steps + on_mask(segments.spread(rest), segments.ends)
    numbers = part_numbers(steps.ends, steps.row, segments)
    return part_advantages(
        rewards, numbers, batch["group_id"], segments, config.advantage_scale, config.gamma
    )


def _steps(batch: Batch, config: AlgorithmConfig) -> _Steps:
    ends, rewards = (batch.ragged(name) for name in STEPS)
    row = Segments.from_cu_seqlens(ends.cu_seqlens).row
    given = rewards.values.float()
    credit = least_of(given, row) if config.step_credit == "min" else given
    return _Steps(ends.values.long(), row, credit, given)


def _placed(steps: _Steps, scores: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    by_steps = torch.zeros_like(scores).index_add(0, steps.row, steps.rewards.to(scores.dtype))
    return rewards_at(steps.ends, steps.credit, steps.row, segments), scores - by_steps
