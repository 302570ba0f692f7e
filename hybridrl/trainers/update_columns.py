"""The columns that updates read: advantages, returns and loss weights. Pure functions, run where
the rows are.

Tokens stay packed, `[tokens]` with their `TokenSegments`: what is computed is as large as there are
tokens, however long the longest sample is. Each docstring says whether rows depend on each other:
where they do not, any part of a batch gives its part of the result.

Credit is assigned to samples, or to the turns of samples. A sample is a row, or the neighbouring
rows of an episode (column `episode`) as if they were one: its tokens are those of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hybridrl.algorithms import (
    PackedTurns,
    TokenSegments,
    divide_by_std,
    estimate_kl,
    gae,
    min_form_rewards,
    overlong_penalty,
    part_advantages,
    part_numbers,
    place_part_rewards,
    remax,
    shape_rewards,
    token_weights,
    whiten,
)
from hybridrl.algorithms.kl_divergence import REWARD_KL_ESTIMATOR
from hybridrl.algorithms.policy_objective import (
    GROUPWISE_ADVANTAGES,
    filter_arguments,
    find_advantage_estimator,
    has_parameter,
)
from hybridrl.algorithms.segments import apply_mask
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import AlgorithmConfig
from hybridrl.errors import ConfigError

SHAPED = "shaped_scores"
"""The column of scores that are learned from, where these are not `scores`."""
STEPS = ("step_ends", "step_rewards")
"""The columns of steps."""
TURN_COLUMNS = ("turn", "turn_rewards")
"""The columns of turns."""
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
    """Return the credit of steps on the last token of each step, `[tokens]`, and the rest of the
    scores that belongs to no step, `[rows]`."""
    by_steps = torch.zeros_like(scores).index_add(0, steps.row, steps.rewards.to(scores.dtype))
    return place_part_rewards(steps.ends, steps.credit, steps.row, segments), scores - by_steps


class CreditedSamples(NamedTuple):
    """Samples that credit is assigned to: `scores` `[samples]`, 0 where the reward was dropped
    (NaN), which is then not `kept`; `lengths` `[samples]`, holes in the mask included; and the
    packed tokens, of which those of dropped samples are off the mask. A sample is a row, or the
    rows of an episode. `has_parts`: whether scores contain the rewards of turns or
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
        placed, scores = _placed(_steps(batch, config), scores, segments)
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


def learned_scores(batch: Batch) -> Tensor:
    """The scores that are learned from."""
    found: Tensor = batch[SHAPED if SHAPED in batch else "scores"]
    return found


GROUP_COLUMNS = ("scores", "group_id", "response_mask")
TOKEN_COLUMNS = ("scores", "response_mask")
ADVANTAGE_COLUMNS = ("advantages", "response_mask")
"""The columns that every way of giving credit makes: nothing is learned from dropped samples."""


def loss_weights(batch: Batch, mode: str, longest: int | None = None) -> Batch:
    """Compute `loss_weights`, the weight of each token in the loss of this whole mini-batch, on
    which every weight depends.

    Args:
        mode: See `token_weights`.
        longest: Longest allowed response; None: the longest of these.
    """
    mask, cu_seqlens = batch.ragged("response_mask")
    cu_seqlens = cu_seqlens[compute_sample_bounds(batch)]
    segments = TokenSegments.from_cu_seqlens(cu_seqlens)
    norm = longest or max([1, *cu_seqlens.diff().tolist()])
    weights = token_weights(mask.bool(), mode, length_norm=norm, segments=segments)
    return _make_token_columns(batch, loss_weights=weights)


def group_advantages(
    batch: Batch, config: AlgorithmConfig, longest: int, rewards: Mapping[str, float] | None = None
) -> Batch:
    """Compute `advantages` by comparing the samples of a prompt, or of the batch, with each other,
    and the `response_mask` without dropped samples. `is_group_local` says which of the two.

    With `algorithm.turn_credit=turn` what is compared are turns: the rewards from each on, with
    those of the same turn of the other samples; see `split_by_turns`.

    Args:
        rewards: The columns of the separate rewards, with their weights, if the estimator reads
            them.
    """
    samples = build_credited_samples(batch, config, longest)
    mask, groups = samples.segments.mask, batch["group_id"][find_first_rows(batch)]
    tokens = {}
    if has_parameter(find_advantage_estimator(config.advantage), "rewards"):
        tokens["rewards"] = token_rewards(batch, samples, config, config.kl_coefficient)
    if config.turn_credit == "turn" and not tokens:
        samples, groups = split_by_turns(batch, samples, groups, config)
    elif config.kl_in_reward:  # for estimators that know one score a sample
        taken = config.kl_coefficient * samples.segments.sum(token_kl(batch, mask, config))
        samples = samples._replace(scores=samples.scores - taken)
    if config.step_credit and config.advantage == GROUP_RELATIVE:
        advantages = step_advantages(batch, config, samples.scores, samples.segments)
        return _make_token_columns(batch, advantages=advantages, response_mask=mask)
    held = samples.kept[samples.segments.row]  # a dropped sample is compared with nothing
    lengths = samples.lengths[samples.kept]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    segments = TokenSegments.from_cu_seqlens(cu_seqlens, mask[held])
    offered = {
        "scores": samples.scores[samples.kept],
        "groups": groups[samples.kept],
        "lengths": segments.lengths,
        "scale": config.advantage_scale,
        "gamma": config.gamma,
    }
    if rewards:
        apart = torch.stack([batch[name].float() for name in rewards], 1)
        offered["reward_scores"] = apart[find_first_rows(batch)][samples.kept]
        offered["reward_weights"] = torch.tensor(list(rewards.values()))
    tokens = {"mask": segments.mask, **{name: x[held] for name, x in tokens.items()}}
    advantages = torch.zeros(len(held))
    if samples.kept.any():
        advantages[held] = _estimate_advantages(config, offered, tokens, segments, lengths)
    return _make_token_columns(batch, advantages=advantages, response_mask=mask)


def is_group_local(config: AlgorithmConfig) -> bool:
    """Return whether `group_advantages` compares only samples of the same prompt, so that a part of
    a batch with whole groups (`group_id`) yields its part of the advantages."""
    return config.advantage in GROUPWISE_ADVANTAGES and config.advantage_scale != "batch"


def greedy_baseline(batch: Batch, config: AlgorithmConfig, longest: int) -> Batch:
    """Compute `greedy_scores`, the scores of greedy responses with the penalty that samples have
    too. Rows do not depend on each other."""
    return Batch.from_columns({"greedy_scores": compute_sample_scores(batch, config, longest)})


def greedy_advantages(
    batch: Batch, config: AlgorithmConfig, longest: int, coefficient: float
) -> Batch:
    """ReMax's `advantages`, against the column `greedy_scores`; samples without one are dropped, as
    there is nothing to compare them with. Rows do not depend on each other."""
    samples = build_credited_samples(batch, config, longest)
    baseline = batch["greedy_scores"][find_first_rows(batch)]
    segments = mask_dropped_samples(samples.segments, baseline.isnan())
    samples = samples._replace(segments=segments)
    rewards = token_rewards(batch, samples, config, coefficient)
    advantages, _ = remax(rewards, baseline.nan_to_num(), segments.mask, segments=segments)
    return _make_token_columns(batch, advantages=advantages, response_mask=segments.mask)


def critic_advantages(
    batch: Batch, config: AlgorithmConfig, longest: int, coefficient: float
) -> Batch:
    """Compute PPO's whitened `advantages`, which depend on all rows, and the `returns` that the
    critic learns."""
    samples = build_credited_samples(batch, config, longest)
    rewards = token_rewards(batch, samples, config, coefficient)
    advantages, returns = _compute_gae(batch, samples, rewards, "values", config)
    mask = samples.segments.mask
    return _make_token_columns(
        batch, advantages=whiten(advantages, mask), returns=returns, response_mask=mask
    )


def constrained_advantages(
    batch: Batch, config: AlgorithmConfig, longest: int, coefficient: float, multiplier: float
) -> Batch:
    """Compute Safe RLHF's advantages: those of the reward minus `multiplier` times those of the
    cost, divided by 1 + `multiplier`; and `returns` and `cost_returns` for the two critics. Half of
    the KL is subtracted from the reward and half is added to the cost. The advantages depend on all
    rows.

    Both advantages are divided by their standard deviation, without taking out their mean: whether
    samples cost more or less than was expected is what the multiplier acts on.
    """
    samples = build_credited_samples(batch, config, longest)
    costs = batch["costs"][find_first_rows(batch)]
    samples = samples._replace(segments=mask_dropped_samples(samples.segments, torch.isnan(costs)))
    rewards = token_rewards(batch, samples, config, coefficient / 2)
    of_costs = samples._replace(scores=costs.nan_to_num(), has_parts=False)
    dangers = token_rewards(batch, of_costs, config, -coefficient / 2)
    good, returns = _compute_gae(batch, samples, rewards, "values", config)
    bad, cost_returns = _compute_gae(batch, samples, dangers, "cost_values", config)
    mask = samples.segments.mask
    good, bad = divide_by_std(good, mask), divide_by_std(bad, mask)
    return _make_token_columns(
        batch,
        advantages=(good - multiplier * bad) / (1 + multiplier),
        returns=returns,
        cost_returns=cost_returns,
        response_mask=mask,
    )


def _compute_gae(
    batch: Batch, samples: CreditedSamples, rewards: Tensor, values: str, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    segments = samples.segments
    known = batch.ragged(values).values
    return gae(rewards, known, segments.mask, config.gamma, config.lam, segments=segments)


def _estimate_advantages(
    config: AlgorithmConfig,
    offered: Mapping[str, Any],
    tokens: Mapping[str, Tensor],
    segments: TokenSegments,
    lengths: Tensor,
) -> Tensor:
    """Return the advantages, `[tokens]`, of the estimator `algorithm.advantage`. An estimator
    without `segments` gets tokens as `[rows, time]`, and may return that or `[rows]`."""
    estimator = find_advantage_estimator(config.advantage)
    if has_parameter(estimator, "segments"):
        found = estimator(
            **filter_arguments(estimator, {**offered, **tokens, "segments": segments})
        )
        shapes = [segments.mask.shape]
    else:
        sizes = lengths.tolist()
        dense = {
            name: pad_sequence(x.split(sizes), batch_first=True)
            for name, x in filter_arguments(estimator, tokens).items()
        }
        found = estimator(**filter_arguments(estimator, offered), **dense)
        shapes = [lengths.shape, torch.Size([len(lengths), int(lengths.max())])]
    if not isinstance(found, Tensor) or found.shape not in shapes:
        raise ConfigError(
            f"algorithm.advantage={config.advantage} must return a number for each of the "
            f"{len(lengths)} samples, or for each token, {list(shapes[-1])}."
        )
    if found.ndim == 2:
        found = found[torch.arange(found.shape[1]) < lengths.unsqueeze(1)]
    elif shapes[0] == lengths.shape:
        found = segments.spread(found)
    return apply_mask(found.float(), segments.mask)


def _make_token_columns(batch: Batch, **packed: Tensor) -> Batch:
    """Make token columns with the rows of the `response_mask`."""
    ragged = batch.ragged("response_mask")
    return Batch.from_columns({name: ragged._replace(values=x) for name, x in packed.items()})
