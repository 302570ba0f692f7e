"""Between the calls: pure functions that the driver programs run beside the data.

Tokens stay packed, `[tokens]` with their `Segments`: what is computed is as large as there are
tokens, however long the longest sample is. Each docstring says whether rows depend on each other:
where they do not, any part of a batch gives its part of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms import (
    Segments,
    divide_by_std,
    gae,
    kl,
    overlong_penalty,
    remax,
    shape_rewards,
    token_weights,
    whiten,
)
from hybridrl.algorithms.kl import IN_REWARD
from hybridrl.algorithms.masking import on_mask
from hybridrl.algorithms.registry import WITHIN_GROUPS, accepted, advantage_estimator, takes
from hybridrl.config.schema import AlgorithmConfig
from hybridrl.core.batch import Batch
from hybridrl.errors import ConfigError

GROUP_COLUMNS = ("scores", "group_id", "response_mask")
TOKEN_COLUMNS = ("scores", "response_mask")
ADVANTAGES = ("advantages", "response_mask")
"""The columns that every way of giving credit makes: nothing is learned from dropped samples."""


def loss_weights(batch: Batch, mode: str, longest: int | None = None) -> Batch:
    """`loss_weights`: the weight of each token in the loss of this whole mini-batch, on which every
    weight depends.

    Args:
        mode: See `token_weights`.
        longest: Longest allowed response; None: the longest of these.
    """
    mask, cu_seqlens = batch.ragged("response_mask")
    segments = Segments.from_cu_seqlens(cu_seqlens)
    norm = longest or max([1, *cu_seqlens.diff().tolist()])
    weights = token_weights(mask.bool(), mode, length_norm=norm, segments=segments)
    return _columns(batch, loss_weights=weights)


def group_advantages(batch: Batch, config: AlgorithmConfig, longest: int) -> Batch:
    """`advantages` from comparing the samples of a prompt, or of the batch, with each other, and
    the `response_mask` without dropped samples. `splits_by_group` says which of both it is."""
    samples = _kept(batch, config, longest)
    scores = samples.scores
    if config.kl_in_reward:  # for estimators that know one score a sample
        scores = scores - config.kl_coefficient * samples.segments.sum(_kl(batch, samples, config))
    kept = ~torch.isnan(batch["scores"])  # a dropped sample is compared with nothing
    held = kept[samples.segments.row]
    cu_seqlens = torch.nn.functional.pad(samples.lengths[kept].cumsum(0), (1, 0))
    segments = Segments.from_cu_seqlens(cu_seqlens, samples.segments.mask[held])
    offered = {
        "scores": scores[kept],
        "groups": batch["group_id"][kept],
        "lengths": segments.lengths,
        "scale": config.advantage_scale,
        "gamma": config.gamma,
    }
    tokens = {"mask": segments.mask}
    if takes(advantage_estimator(config.advantage), "rewards"):
        rewards = _token_rewards(batch, samples, samples.scores, config, config.kl_coefficient)
        tokens["rewards"] = rewards[held]
    advantages = torch.zeros(len(held))
    if kept.any():
        advantages[held] = _estimate(config, offered, tokens, segments, cu_seqlens.diff())
    return _columns(batch, advantages=advantages, response_mask=samples.segments.mask)


def splits_by_group(config: AlgorithmConfig) -> bool:
    """Whether `group_advantages` compares the samples of a prompt with each other only, so that a
    part of a batch that holds whole groups (`group_id`) gives its part of the advantages."""
    return config.advantage in WITHIN_GROUPS and config.advantage_scale != "batch"


def as_baseline(batch: Batch, config: AlgorithmConfig, longest: int) -> Batch:
    """`greedy_scores`: the scores of greedy answers, with the penalty that samples have too. Rows
    do not depend on each other."""
    return Batch.from_columns({"greedy_scores": _scores(batch, config, longest)})


def greedy_advantages(
    batch: Batch, config: AlgorithmConfig, longest: int, coefficient: float
) -> Batch:
    """ReMax's `advantages`, against the column `greedy_scores`. Rows do not depend on each
    other."""
    samples = _kept(batch, config, longest)
    rewards = _token_rewards(batch, samples, samples.scores, config, coefficient)
    baseline = batch["greedy_scores"].nan_to_num()
    segments = samples.segments
    advantages, _ = remax(rewards, baseline, segments.mask, segments=segments)
    return _columns(batch, advantages=advantages, response_mask=segments.mask)


def critic_advantages(
    batch: Batch, config: AlgorithmConfig, longest: int, coefficient: float
) -> Batch:
    """PPO's whitened `advantages`, which depend on all rows, and the `returns` that the critic
    learns."""
    samples = _kept(batch, config, longest)
    rewards = _token_rewards(batch, samples, samples.scores, config, coefficient)
    advantages, returns = _gae(batch, samples, rewards, "values", config)
    mask = samples.segments.mask
    return _columns(batch, advantages=whiten(advantages, mask), returns=returns, response_mask=mask)


def constrained_advantages(
    batch: Batch, config: AlgorithmConfig, longest: int, coefficient: float, multiplier: float
) -> Batch:
    """Safe-RLHF's: advantages of the reward, minus `multiplier` times those of the cost, on the
    scale of one of them; `returns` and `cost_returns` for the two critics. The KL is taken half off
    the reward and half onto the cost. The advantages depend on all rows.

    Both advantages are divided by their standard deviation, without taking out their mean: whether
    samples cost more or less than was expected is what the multiplier acts on.
    """
    samples = _kept(batch, config, longest)
    paid = ~torch.isnan(batch["costs"])
    samples = samples._replace(segments=_without(samples.segments, ~paid))
    costs = batch["costs"].nan_to_num()
    rewards = _token_rewards(batch, samples, samples.scores, config, coefficient / 2)
    dangers = _token_rewards(batch, samples, costs, config, -coefficient / 2)
    good, returns = _gae(batch, samples, rewards, "values", config)
    bad, cost_returns = _gae(batch, samples, dangers, "cost_values", config)
    mask = samples.segments.mask
    good, bad = divide_by_std(good, mask), divide_by_std(bad, mask)
    return _columns(
        batch,
        advantages=(good - multiplier * bad) / (1 + multiplier),
        returns=returns,
        cost_returns=cost_returns,
        response_mask=mask,
    )


class _Samples(NamedTuple):
    """What there is to learn from: `scores` `[rows]`, 0 where the reward was dropped (NaN);
    `lengths` `[rows]`, holes in the mask included; and the packed tokens, of which those of dropped
    samples are off the mask."""

    scores: Tensor
    lengths: Tensor
    segments: Segments


def _kept(batch: Batch, config: AlgorithmConfig, longest: int) -> _Samples:
    mask, cu_seqlens = batch.ragged("response_mask")
    scores = _scores(batch, config, longest)
    segments = _without(Segments.from_cu_seqlens(cu_seqlens, mask), torch.isnan(scores))
    return _Samples(scores.nan_to_num(), cu_seqlens.diff(), segments)


def _scores(batch: Batch, config: AlgorithmConfig, longest: int) -> Tensor:
    """Scores with the overlong penalty; NaN where the reward was dropped."""
    scores: Tensor = batch["scores"]
    if not config.overlong_buffer:
        return scores
    lengths = batch.ragged("response_mask").lengths
    return scores + overlong_penalty(
        lengths, longest, config.overlong_buffer, config.overlong_factor
    )


def _without(segments: Segments, dropped: Tensor) -> Segments:
    """These samples, of which those that are dropped, bool `[rows]`, have no tokens."""
    return segments.within(~dropped[segments.row])


def _kl(batch: Batch, samples: _Samples, config: AlgorithmConfig) -> Tensor:
    """The KL that is taken off the reward, of each token."""
    log_probs, reference = batch.ragged("log_probs"), batch.ragged("ref_log_probs")
    estimator = config.kl_estimator or IN_REWARD
    return kl(log_probs.values, reference.values, estimator, mask=samples.segments.mask)


def _token_rewards(
    batch: Batch, samples: _Samples, scores: Tensor, config: AlgorithmConfig, coefficient: float
) -> Tensor:
    """The score on the last token, minus the KL on each where that is part of the reward."""
    segments = samples.segments
    if config.kl_in_reward:
        log_probs = batch.ragged("log_probs").values
        reference = batch.ragged("ref_log_probs").values
    else:
        log_probs = reference = torch.zeros(segments.mask.shape)
        coefficient = 0.0
    estimator = config.kl_estimator or IN_REWARD
    return shape_rewards(
        *(scores, segments.mask, log_probs, reference, coefficient, estimator), segments=segments
    )


def _gae(
    batch: Batch, samples: _Samples, rewards: Tensor, values: str, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    segments = samples.segments
    known = batch.ragged(values).values
    return gae(rewards, known, segments.mask, config.gamma, config.lam, segments=segments)


def _estimate(
    config: AlgorithmConfig,
    offered: Mapping[str, Any],
    tokens: Mapping[str, Tensor],
    segments: Segments,
    lengths: Tensor,
) -> Tensor:
    """The advantages, `[tokens]`, of `algorithm.advantage`. A function that knows nothing of
    `segments` is given its tokens as `[rows, time]`, and may return that or `[rows]`."""
    estimator = advantage_estimator(config.advantage)
    if takes(estimator, "segments"):
        found = estimator(**accepted(estimator, {**offered, **tokens, "segments": segments}))
        shapes = [segments.mask.shape]
    else:
        dense = {name: _padded(x, lengths) for name, x in accepted(estimator, tokens).items()}
        found = estimator(**accepted(estimator, offered), **dense)
        shapes = [lengths.shape, torch.Size([len(lengths), int(lengths.max())])]
    if not isinstance(found, Tensor) or found.shape not in shapes:
        raise ConfigError(
            f"algorithm.advantage={config.advantage} must return a number for each of the "
            f"{len(lengths)} samples, or for each token, {list(shapes[-1])}."
        )
    if found.ndim == 2:
        found = found[_real(lengths)]
    elif shapes[0] == lengths.shape:
        found = segments.spread(found)
    return on_mask(found.float(), segments.mask)


def _real(lengths: Tensor) -> Tensor:
    """Bool `[rows, longest]`, where left-aligned rows of these lengths have tokens."""
    return torch.arange(int(lengths.max())) < lengths.unsqueeze(1)


def _padded(packed: Tensor, lengths: Tensor) -> Tensor:
    """Packed tokens as `[rows, longest]`, left-aligned."""
    real = _real(lengths)
    dense = torch.zeros(real.shape, dtype=packed.dtype)
    dense[real] = packed
    return dense


def _columns(batch: Batch, **packed: Tensor) -> Batch:
    """Token columns whose rows lie as those of the `response_mask`."""
    ragged = batch.ragged("response_mask")
    return Batch.from_columns({name: ragged._replace(values=x) for name, x in packed.items()})
