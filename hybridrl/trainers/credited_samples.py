"""Samples, or the turns of samples, with the score that credit is assigned from.

A sample is a row, or the neighbouring rows of an episode (column `episode`) as if they were one:
its tokens are those of all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms import (
    PackedTurns,
    TokenSegments,
    estimate_kl,
    min_form_rewards,
    overlong_penalty,
    part_advantages,
    part_numbers,
    place_part_rewards,
    shape_rewards,
)
from hybridrl.algorithms.policy_losses import REWARD_KL_ESTIMATOR
from hybridrl.algorithms.segments import apply_mask
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import AlgorithmConfig, Config, RewardConfig, is_served

SHAPED = "shaped_scores"
"""The column of scores that are learned from, where these are not `scores`."""
STEPS = ("step_ends", "step_rewards")
"""The columns of steps."""
GROUP_RELATIVE = "group_relative"
"""The estimator that compares steps with steps; others that read rewards of tokens find the steps'
among them."""


class _Steps(NamedTuple):
    """The reasoning steps of all samples, each `[steps]`: the number of tokens up to its end, its
    row, its credit, its reward."""

    ends: Tensor
    row: Tensor
    credit: Tensor
    rewards: Tensor


def split_step_rewards(
    batch: Batch, config: AlgorithmConfig, scores: Tensor, segments: TokenSegments
) -> tuple[Tensor, Tensor]:
    """Return the rewards of steps on the last token of each step, `[tokens]`, and the rest of the
    scores that belongs to no step, `[rows]`."""
    return _placed(_steps(batch, config), scores, segments)


def step_advantages(
    batch: Batch, config: AlgorithmConfig, scores: Tensor, segments: TokenSegments
) -> Tensor:
    """Return token advantages of comparing each step with the same step of the group's other
    samples; the rest of a score lies on the last token."""
    steps = _steps(batch, config)
    on_steps, rest = _placed(steps, scores, segments)
    rewards = on_steps + apply_mask(segments.spread(rest), segments.ends)
    numbers = part_numbers(steps.ends, steps.row, segments)
    return part_advantages(
        rewards, numbers, batch["group_id"], segments, config.advantage_scale, config.gamma
    )


def _steps(batch: Batch, config: AlgorithmConfig) -> _Steps:
    ends, rewards = (batch.ragged(name) for name in STEPS)
    row = TokenSegments.from_cu_seqlens(ends.cu_seqlens).row
    given = rewards.values.float()
    credit = min_form_rewards(given, row) if config.step_credit == "min" else given
    return _Steps(ends.values.long(), row, credit, given)


def _placed(steps: _Steps, scores: Tensor, segments: TokenSegments) -> tuple[Tensor, Tensor]:
    by_steps = torch.zeros_like(scores).index_add(0, steps.row, steps.rewards.to(scores.dtype))
    return place_part_rewards(steps.ends, steps.credit, steps.row, segments), scores - by_steps


_TURN_COLUMNS = ("turn", "turn_rewards")


def list_credit_columns(config: Config) -> list[str]:
    """The columns that giving credit needs besides scores: these as they are learned from, where
    that are others; which rows are of one episode, where they may be several; and what was rewarded
    in which turn or step, where that counts."""
    found = [SHAPED] if shapes(config.reward) else []
    found += ["episode"] if is_served(config.rollout, config.environment) else []
    found += _TURN_COLUMNS if config.algorithm.turn_credit == "turn" else []
    return [*found, *(STEPS if config.algorithm.step_credit else [])]


class CreditedSamples(NamedTuple):
    """Samples that credit is assigned to: `scores` `[samples]`, 0 where the reward was dropped
    (NaN), which is then not `kept`; `lengths` `[samples]`, holes in the mask included; and the
    packed tokens, of which those of dropped samples are off the mask. A sample is a row, or the
    rows of an episode. `has_partial_rewards`: whether scores contain the rewards of turns or
    steps."""

    scores: Tensor
    kept: Tensor
    lengths: Tensor
    segments: TokenSegments
    has_parts: bool = True


def find_first_rows(batch: Batch) -> Tensor:
    """Return the number of the first row of each sample."""
    if "episode" not in batch:
        return torch.arange(len(batch))
    episode = batch["episode"]
    begins = torch.ones(len(episode), dtype=torch.bool)
    begins[1:] = episode[1:] != episode[:-1]
    return begins.nonzero()[:, 0]


def compute_sample_bounds(batch: Batch) -> Tensor:
    """Return the first row of each sample, followed by the number of rows."""
    return torch.cat([find_first_rows(batch), torch.tensor([len(batch)])])


def build_credited_samples(batch: Batch, config: AlgorithmConfig, longest: int) -> CreditedSamples:
    """Build the samples of a batch, with the penalty for overlong responses in their scores."""
    mask, cu_seqlens = batch.ragged("response_mask")
    cu_seqlens = cu_seqlens[compute_sample_bounds(batch)]
    scores = compute_sample_scores(batch, config, longest)
    kept = ~torch.isnan(scores)
    segments = mask_dropped_samples(TokenSegments.from_cu_seqlens(cu_seqlens, mask), ~kept)
    return CreditedSamples(scores.nan_to_num(), kept, cu_seqlens.diff(), segments)


def compute_sample_scores(batch: Batch, config: AlgorithmConfig, longest: int) -> Tensor:
    """Return the scores of samples with the overlong penalty; NaN where the reward was dropped."""
    scores = learned_scores(batch)[find_first_rows(batch)]
    if not config.overlong_buffer:
        return scores
    lengths = batch.ragged("response_mask").cu_seqlens[compute_sample_bounds(batch)].diff()
    return scores + overlong_penalty(
        lengths, longest, config.overlong_buffer, config.overlong_factor
    )


def mask_dropped_samples(segments: TokenSegments, dropped: Tensor) -> TokenSegments:
    """Return the segments with the tokens of dropped samples (bool `[rows]`) masked."""
    return segments.within(~dropped[segments.row])


def token_kl(batch: Batch, mask: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return the KL penalty of each token that is subtracted from the reward."""
    log_probs, reference = batch.ragged("log_probs"), batch.ragged("ref_log_probs")
    estimator = config.kl_estimator or REWARD_KL_ESTIMATOR
    return estimate_kl(log_probs.values, reference.values, estimator, mask=mask)


def token_rewards(
    batch: Batch, samples: CreditedSamples, config: AlgorithmConfig, coefficient: float
) -> Tensor:
    """Return token rewards: the score on the last token of each sample, minus the KL of each token
    if the KL is part of the reward. Rewards of turns (`algorithm.turn_credit=turn`) or of steps
    (`algorithm.step_credit`) lie on the last token of their turn or step instead."""
    segments, scores = samples.segments, samples.scores
    placed = torch.zeros(segments.mask.shape)
    if config.turn_credit == "turn" and samples.has_parts:
        placed = _build_turns(batch, segments).placed(segments.mask)
        scores = scores - segments.sum(placed)
    elif config.step_credit and samples.has_parts:
        placed, scores = split_step_rewards(batch, config, scores, segments)
    if config.kl_in_reward:
        log_probs = batch.ragged("log_probs").values
        reference = batch.ragged("ref_log_probs").values
    else:
        log_probs = reference = torch.zeros(segments.mask.shape)
        coefficient = 0.0
    estimator = config.kl_estimator or REWARD_KL_ESTIMATOR
    return placed + shape_rewards(
        *(scores, segments.mask, log_probs, reference, coefficient, estimator), segments=segments
    )


def _build_turns(batch: Batch, segments: TokenSegments) -> PackedTurns:
    rewards = batch.select(["turn_rewards"]).take(find_first_rows(batch)).ragged("turn_rewards")
    return PackedTurns.of(segments, batch.ragged("turn").values, rewards.values, rewards.lengths)


def split_by_turns(
    batch: Batch, samples: CreditedSamples, groups: Tensor, config: AlgorithmConfig
) -> tuple[CreditedSamples, Tensor]:
    """Return the turns of the samples in place of the samples, with groups of equal turns of a
    prompt. The score of a turn is the sum of rewards from it on, discounted by `gamma` for each
    turn; the KL of its tokens is subtracted from its reward."""
    mask = samples.segments.mask
    turns = _build_turns(batch, samples.segments)
    segments = turns.segments(mask)
    penalty = torch.zeros(segments.rows)
    if config.kl_in_reward:
        penalty = config.kl_coefficient * segments.sum(token_kl(batch, mask, config))
    scores = turns.to_go(samples.scores, penalty, config.gamma)
    lengths = turns.run.bincount(minlength=segments.rows)
    kept = samples.kept[turns.sample[turns.turn]]
    return CreditedSamples(scores, kept, lengths, segments), turns.groups(groups)


def shapes(reward: RewardConfig) -> bool:
    """Whether what is learned from are other scores than those that were given."""
    return bool(reward.shorter or reward.normalise_by)


def learned_scores(batch: Batch) -> Tensor:
    """The scores that are learned from."""
    found: Tensor = batch[SHAPED if SHAPED in batch else "scores"]
    return found
