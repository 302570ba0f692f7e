"""Between the calls: pure functions that the driver programs run beside the data."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms import (
    gae,
    overlong_penalty,
    remax,
    shape_rewards,
    token_weights,
    whiten,
)
from hybridrl.algorithms.registry import accepted, advantage_estimator
from hybridrl.config.schema import AlgorithmConfig
from hybridrl.core.batch import Batch, Ragged
from hybridrl.errors import ConfigError

GROUP_COLUMNS = ("scores", "group_id", "response_mask")
TOKEN_COLUMNS = ("scores", "response_mask")


def loss_weights(batch: Batch, mode: str, longest: int | None = None) -> Batch:
    """`loss_weights`: the weight of each token in the loss of this whole mini-batch.

    Args:
        mode: See `token_weights`.
        longest: Longest allowed response.
    """
    mask, real = batch.padded("response_mask")
    weights = token_weights(mask.bool(), mode, length_norm=longest)
    return Batch.from_columns({"loss_weights": _ragged(batch, weights, real)})


def group_advantages(batch: Batch, config: AlgorithmConfig, longest: int) -> Batch:
    """`advantages` from comparing the samples of a prompt, or of the batch, with each other, and
    the `response_mask` without dropped samples."""
    scores, mask, real = _kept(batch, config, longest)
    rewards = _token_rewards(batch, scores, mask, config, config.kl_coefficient)
    kept = ~torch.isnan(batch["scores"])  # a dropped sample is compared with nothing
    estimator = advantage_estimator(config.advantage)
    offered = {
        "scores": scores[kept],
        "groups": batch["group_id"][kept],
        "lengths": mask[kept].sum(1),
        "mask": mask[kept],
        "rewards": rewards[kept],
        "scale": config.advantage_scale,
        "gamma": config.gamma,
    }
    found = estimator(**accepted(estimator, offered)) if kept.any() else scores[kept]
    rows = mask[kept].shape
    if not isinstance(found, Tensor) or found.shape not in (rows, rows[:1]):
        raise ConfigError(
            f"algorithm.advantage={config.advantage} must return a number for each of the "
            f"{rows[0]} samples, or for each token, {list(rows)}."
        )
    advantages = torch.zeros(mask.shape)
    advantages[kept] = (found if found.ndim == 2 else found.unsqueeze(1).expand(rows)).float()
    return _columns(batch, real, advantages=advantages, response_mask=mask.to(torch.uint8))


def as_baseline(batch: Batch) -> Batch:
    """`greedy_scores`: the scores under their new name."""
    return Batch.from_columns({"greedy_scores": batch["scores"]})


def greedy_advantages(
    batch: Batch, config: AlgorithmConfig, longest: int, coefficient: float
) -> Batch:
    """ReMax's `advantages`, against the column `greedy_scores`."""
    scores, mask, real = _kept(batch, config, longest)
    rewards = _token_rewards(batch, scores, mask, config, coefficient)
    baseline = batch["greedy_scores"].nan_to_num()
    advantages, _ = remax(rewards, baseline, mask)
    return _columns(batch, real, advantages=advantages, response_mask=mask.to(torch.uint8))


def critic_advantages(
    batch: Batch, config: AlgorithmConfig, longest: int, coefficient: float
) -> Batch:
    """PPO's whitened `advantages`, and the `returns` that the critic learns."""
    scores, mask, real = _kept(batch, config, longest)
    rewards = _token_rewards(batch, scores, mask, config, coefficient)
    advantages, returns = gae(rewards, _dense(batch, "values"), mask, config.gamma, config.lam)
    return _columns(
        batch, real, advantages=whiten(advantages, mask), returns=returns, response_mask=mask
    )


def constrained_advantages(
    batch: Batch, config: AlgorithmConfig, longest: int, coefficient: float, multiplier: float
) -> Batch:
    """Safe-RLHF's: advantages of the reward, minus `multiplier` times those of the cost, on the
    scale of one of them; `returns` and `cost_returns` for the two critics. The KL is taken half off
    the reward and half onto the cost."""
    scores, mask, real = _kept(batch, config, longest)
    mask = mask & ~torch.isnan(batch["costs"]).unsqueeze(1)
    costs = batch["costs"].nan_to_num()
    rewards = _token_rewards(batch, scores, mask, config, coefficient / 2)
    dangers = _token_rewards(batch, costs, mask, config, -coefficient / 2)
    values, cost_values = _dense(batch, "values"), _dense(batch, "cost_values")
    good, returns = gae(rewards, values, mask, config.gamma, config.lam)
    bad, cost_returns = gae(dangers, cost_values, mask, config.gamma, config.lam)
    good, bad = whiten(good, mask), whiten(bad, mask, shift_mean=False)
    return _columns(
        batch,
        real,
        advantages=(good - multiplier * bad) / (1 + multiplier),
        returns=returns,
        cost_returns=cost_returns,
        response_mask=mask.to(torch.uint8),
    )


def _kept(batch: Batch, config: AlgorithmConfig, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with the overlong penalty, 0 where the reward was dropped (NaN); the dense mask, empty
    for dropped samples, from which nothing is learned; and where its rows have tokens."""
    mask, real = batch.padded("response_mask")
    mask = mask.bool() & ~torch.isnan(batch["scores"]).unsqueeze(1)
    scores = batch["scores"].nan_to_num()
    if config.overlong_buffer:
        lengths = real.sum(1)
        scores = scores + overlong_penalty(
            lengths, longest, config.overlong_buffer, config.overlong_factor
        )
    return scores, mask, real


def _token_rewards(
    batch: Batch, scores: Tensor, mask: Tensor, config: AlgorithmConfig, coefficient: float
) -> Tensor:
    """The score on the last token, minus the KL on each where that is part of the reward."""
    if config.kl_in_reward:
        log_probs, reference = _dense(batch, "log_probs"), _dense(batch, "ref_log_probs")
    else:
        log_probs = reference = torch.zeros(mask.shape)
        coefficient = 0.0
    return shape_rewards(scores, mask, log_probs, reference, coefficient, config.kl_estimator)


def _dense(batch: Batch, name: str) -> Tensor:
    return batch.padded(name)[0]


def _ragged(batch: Batch, dense: Tensor, real: Tensor) -> Ragged:
    return batch.ragged("response_mask")._replace(values=dense[real])


def _columns(batch: Batch, real: Tensor, **dense: Tensor) -> Batch:
    return Batch.from_columns({name: _ragged(batch, x, real) for name, x in dense.items()})
