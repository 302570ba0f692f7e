"""The columns that updates read: advantages, returns and loss weights. Pure functions, run where
the rows are.

Tokens stay packed, `[tokens]` with their `TokenSegments`: what is computed is as large as there are
tokens, however long the longest sample is. Each docstring says whether rows depend on each other:
where they do not, any part of a batch gives its part of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms import (
    TokenSegments,
    divide_by_std,
    gae,
    remax,
    token_weights,
    whiten,
)
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
from hybridrl.trainers.credited_samples import (
    GROUP_RELATIVE,
    CreditedSamples,
    build_credited_samples,
    compute_sample_bounds,
    compute_sample_scores,
    find_first_rows,
    mask_dropped_samples,
    split_by_turns,
    step_advantages,
    token_kl,
    token_rewards,
)

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


def group_advantages(batch: Batch, config: AlgorithmConfig, longest: int) -> Batch:
    """Compute `advantages` by comparing the samples of a prompt, or of the batch, with each other,
    and the `response_mask` without dropped samples. `is_group_local` says which of the two.

    With `algorithm.turn_credit=turn` what is compared are turns: the rewards from each on, with
    those of the same turn of the other samples; see `split_by_turns`.
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
    samples, baseline = (
        build_credited_samples(batch, config, longest),
        batch["greedy_scores"][find_first_rows(batch)],
    )
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
        dense = {
            name: _pad_tokens(x, lengths) for name, x in filter_arguments(estimator, tokens).items()
        }
        found = estimator(**filter_arguments(estimator, offered), **dense)
        shapes = [lengths.shape, torch.Size([len(lengths), int(lengths.max())])]
    if not isinstance(found, Tensor) or found.shape not in shapes:
        raise ConfigError(
            f"algorithm.advantage={config.advantage} must return a number for each of the "
            f"{len(lengths)} samples, or for each token, {list(shapes[-1])}."
        )
    if found.ndim == 2:
        found = found[_token_mask(lengths)]
    elif shapes[0] == lengths.shape:
        found = segments.spread(found)
    return apply_mask(found.float(), segments.mask)


def _token_mask(lengths: Tensor) -> Tensor:
    """Return a mask, bool `[rows, longest]`, of the tokens of left-aligned rows of these
    lengths."""
    return torch.arange(int(lengths.max())) < lengths.unsqueeze(1)


def _pad_tokens(packed: Tensor, lengths: Tensor) -> Tensor:
    """Pad packed tokens to `[rows, longest]`, left-aligned."""
    real = _token_mask(lengths)
    dense = torch.zeros(real.shape, dtype=packed.dtype)
    dense[real] = packed
    return dense


def _make_token_columns(batch: Batch, **packed: Tensor) -> Batch:
    """Make token columns with the rows of the `response_mask`."""
    ragged = batch.ragged("response_mask")
    return Batch.from_columns({name: ragged._replace(values=x) for name, x in packed.items()})
