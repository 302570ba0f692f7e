"""Advantages that compare the responses to one prompt with each other, without a critic.

All take one score per row and return one advantage per row, ``[rows]``; `spread` puts it on the
tokens. A group of one has advantage 0, because there is nothing to compare it with. Groups do not
depend on each other, but for the scale ``batch`` and for `reinforce_plus_plus_baseline`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.segments import (
    RowGroups,
    TokenSegments,
    apply_mask,
    as_float,
    check_known_name,
    resolve_segments,
    whiten,
)
from hybridrl.errors import DataError

ADVANTAGE_SCALES = ("std", "batch", "none")


@torch.no_grad()
def group_relative(scores: Tensor, groups: Tensor, scale: str = "std", eps: float = 1e-6) -> Tensor:
    """Compute (score - mean of its group) / (standard deviation + eps), with unbiased deviations.

    scale: ``std`` divides by the group's own standard deviation (GRPO, Shao 2024,
    arXiv:2402.03300, section 4.1); ``none`` leaves the division out (Dr. GRPO, Liu 2025,
    arXiv:2503.20783); ``batch`` divides by the standard deviation of all scores of the batch.
    """
    members = RowGroups.of(groups)
    return _scaled(members.centred(scores), scores, members, scale, eps)


@torch.no_grad()
def leave_one_out(scores: Tensor, groups: Tensor) -> Tensor:
    """Compute the score minus the mean score of the *others* in its group.

    RLOO: Ahmadian 2024, arXiv:2402.14740.
    """
    members = RowGroups.of(groups)
    # s_i - (S - s_i) / (n - 1) = (s_i - S / n) n / (n - 1)
    return members.centred(scores) * members.size / (members.size - 1).clamp(min=1)


@torch.no_grad()
def optimal_reward_baseline(scores: Tensor, lengths: Tensor, groups: Tensor) -> Tensor:
    """Compute the score minus its group's length-weighted mean, sum(length s) / sum(length).

    lengths: tokens of each row, ``[rows]``. A group without any token has advantage 0.
    OPO: Hao 2025, arXiv:2505.23585, the baseline of least gradient variance when the squared
    gradient of an answer grows with its length.
    """
    members = RowGroups.of(groups)
    anchored, weights = as_float(members.anchored(scores), lengths)
    total = members.sum(weights)
    baseline = members.sum(weights * anchored) / total
    return torch.where((total > 0) & (members.size > 1), anchored - baseline, 0.0)


@torch.no_grad()
def pass_at_k(scores: Tensor, groups: Tensor, scale: str = "std", eps: float = 1e-6) -> Tensor:
    """Give an advantage to a group's best only: best - second best, scaled as `group_relative`. A
    tie for the best leaves the whole group at 0.

    The score of a group is that of its best answer; this is what the best one adds to it
    (leave-one-out of the maximum; Tang 2025, arXiv:2503.19595).
    """
    members = RowGroups.of(groups)
    (scores,) = as_float(scores)
    is_best = scores == members.max(scores)
    alone = (members.sum(is_best.to(scores.dtype)) == 1) & (members.size > 1)
    second = members.max(torch.where(is_best, -torch.inf, scores))
    gap = torch.where(is_best & alone, scores - second, 0.0)
    return _scaled(gap, scores, members, scale, eps)


@torch.no_grad()
def reinforce_plus_plus_baseline(
    scores: Tensor, groups: Tensor, mask: Tensor, *, segments: TokenSegments | None = None
) -> Tensor:
    """Compute the score minus its group's mean on every token, whitened over the batch.

    scores, groups: ``[rows]``; mask: ``[rows, time]``, or packed ``[tokens]`` with ``segments``.
    Returns advantages shaped like the mask; every row depends on all.
    REINFORCE++-baseline: Hu 2025, arXiv:2501.03262.
    """
    members = RowGroups.of(groups)
    samples = resolve_segments(mask, segments)
    advantages = whiten(samples.spread(members.centred(scores)), samples.mask)
    # Whitening shifts the mean, also for a row that had nothing to be compared with.
    return apply_mask(advantages, (members.size > 1)[samples.row])


@torch.no_grad()
def maximum_likelihood(scores: Tensor, groups: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute (score - mean of its group) / mean of its group; 0 where the mean is not above eps.

    With scores of 0 and 1 the mean is the share that is right, so prompts that are rarely solved
    count more, as they do for the likelihood of a right answer.
    MaxRL: Tajwar 2026, arXiv:2602.02710.

    Raises:
        DataError: if a score is negative, for then the mean says nothing.
    """
    members = RowGroups.of(groups)
    (scores,) = as_float(scores)
    if (scores < 0).any():
        raise DataError(
            "A sample (with algorithm.turn_credit=turn, the rest of one from a turn on) was scored "
            f"{float(scores.min()):g}, and algorithm.advantage=maximum_likelihood divides by the "
            "mean score of a prompt. Let all rewards be 0 or more, and the score of a sample no "
            "less than the rewards of its turns together, or choose another algorithm.advantage."
        )
    mean = members.sum(scores) / members.size
    return torch.where(mean > eps, members.centred(scores) / mean.clamp(min=eps), 0.0)


@torch.no_grad()
def gdpo(
    reward_scores: Tensor, reward_weights: Tensor, groups: Tensor, eps: float = 1e-6
) -> Tensor:
    """Compute the weighted sum of what `group_relative` makes of each reward alone, minus its mean
    and over its standard deviation of the whole batch.

    reward_scores: ``[rows, rewards]``, NaN where a row has no such reward, which is then compared
    with nothing; reward_weights: ``[rewards]``. A reward of small numbers counts as much as one of
    large ones, and different mixtures of equal sums are told apart.
    GDPO: Liu 2026, arXiv:2601.05242.
    """
    members, rows = RowGroups.of(groups), len(groups)
    reward_scores, reward_weights = as_float(reward_scores, reward_weights)
    total = torch.zeros_like(reward_scores[:, 0])
    for scores, weight in zip(reward_scores.unbind(1), reward_weights, strict=True):
        alone = torch.arange(rows, device=groups.device) + members.count
        others = torch.where(scores.isnan(), alone, members.index)
        total = total + weight * group_relative(scores.nan_to_num(), others, eps=eps)
    batch = RowGroups.of(torch.zeros_like(members.index))
    whitened = batch.centred(total) / (batch.std(total) + eps)
    return torch.where(members.size > 1, whitened, 0.0)


@torch.no_grad()
def find_informative_rows(scores: Tensor, groups: Tensor) -> Tensor:
    """Return bool ``[rows]``: false for every row of a group whose scores are all equal.

    Such a group has no advantage and so no gradient. DAPO's dynamic sampling, Yu 2025,
    arXiv:2503.14476, section 3.2.
    """
    members = RowGroups.of(groups)
    (scores,) = as_float(scores)
    return members.max(scores) != members.min(scores)


def _scaled(
    advantages: Tensor, scores: Tensor, members: RowGroups, scale: str, eps: float
) -> Tensor:
    check_known_name("scale", scale, ADVANTAGE_SCALES)
    if scale == "none":
        return advantages
    if scale == "std":
        return advantages / (members.std(scores) + eps)
    batch = RowGroups.of(torch.zeros_like(members.index))
    return advantages / (batch.std(scores) + eps)
