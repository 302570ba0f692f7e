"""Credit for parts of a response: steps of a solution, turns of an episode.

A part is a run of tokens with a number, from 0 in each row. Tokens are packed ``[tokens]``, with
the `TokenSegments` that tell the rows; those off the mask belong to no part and receive 0. Nothing
here knows what the parts are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.advantages import place_on_mask, returns_to_go
from hybridrl.algorithms.group_advantages import group_relative
from hybridrl.algorithms.segments import RowGroups, TokenSegments, as_float

_MIN_TEMPERATURE = 0.1


@torch.no_grad()
def place_part_rewards(
    ends: Tensor, rewards: Tensor, row: Tensor, segments: TokenSegments
) -> Tensor:
    """Place the rewards of parts on the tokens that they end with, ``[tokens]``.

    Where that token is off the mask (a tool said it), it is the last one before it on the mask, or
    the row's first; a row without tokens has no place for its rewards.

    ends: ``[parts]``, tokens of the row, holes included, up to the end of the part; rewards, row:
    ``[parts]``, what the part earned and the row it is of.
    """
    (rewards,) = as_float(rewards)
    found = torch.zeros(segments.mask.shape, dtype=rewards.dtype, device=rewards.device)
    places, has_place = _places(ends, row, segments)
    return found.index_add(0, places[has_place], rewards[has_place])


@torch.no_grad()
def part_numbers(ends: Tensor, row: Tensor, segments: TokenSegments) -> Tensor:
    """Return the number of the part that each token is in, int64 ``[tokens]``."""
    places, has_place = _places(ends, row, segments)
    is_end = torch.zeros(segments.mask.shape, dtype=torch.long, device=segments.row.device)
    is_end[places[has_place]] = 1
    before = is_end.cumsum(0) - is_end
    starts = _starts(segments)[segments.row]
    return before - before[starts] if len(before) else before


@torch.no_grad()
def part_advantages(
    rewards: Tensor,
    numbers: Tensor,
    groups: Tensor,
    segments: TokenSegments,
    scale: str = "std",
    gamma: float = 1.0,
) -> Tensor:
    """Compute each part's return less those of the same number in its group, on all its tokens.

    The return of a part is that of its first token. A part whose number no other row of the group
    has is compared with nothing and has advantage 0. With one part a row, and the reward at its
    end, this is `group_relative`. Groups do not depend on each other, but for the scale ``batch``.

    rewards: ``[tokens]``; numbers: ``[tokens]``, from 0; groups: ``[rows]``; scale: see
    `group_relative`. Process supervision of GRPO, Shao 2024, arXiv:2402.03300, section 4.1.3,
    normalises the rewards of all steps of a group together and sums them afterwards; here steps are
    compared with those that stand in the same place.
    """
    held = segments.mask
    returns = returns_to_go(rewards, held, gamma, segments=segments)[held]
    row, number = segments.row[held], numbers[held]
    _, part = torch.unique(torch.stack([row, number]), dim=1, return_inverse=True)
    count = int(part.max()) + 1 if len(part) else 0
    first = torch.full((count,), len(part), device=part.device)
    first = first.scatter_reduce(0, part, torch.arange(len(part), device=part.device), "amin")
    keys = torch.stack([groups[row[first]], number[first]])
    _, compared = torch.unique(keys, dim=1, return_inverse=True)
    return place_on_mask(held, group_relative(returns[first], compared, scale)[part])


@torch.no_grad()
def min_form_rewards(rewards: Tensor, row: Tensor) -> Tensor:
    """Weigh each part's reward by the softmax of -reward / 0.1 in its row, ``[parts]``.

    What an answer is worth is then its worst step, and no further steps can add to it. PURE, Cheng
    2025, arXiv:2504.15275, equation 8.
    """
    members = RowGroups.of(row)
    (rewards,) = as_float(rewards)
    weights = (-(rewards - members.min(rewards)) / _MIN_TEMPERATURE).exp()
    return rewards * weights / members.sum(weights)


def _places(ends: Tensor, row: Tensor, segments: TokenSegments) -> tuple[Tensor, Tensor]:
    """Return the token of each part's reward, and whether its row has one, bool ``[parts]``."""
    mask = segments.mask
    if not len(mask) or not len(ends):
        none = torch.zeros(len(ends), dtype=torch.long, device=mask.device)
        return none, torch.zeros(len(ends), dtype=torch.bool, device=mask.device)
    numbers = torch.arange(len(mask), device=mask.device)
    before = torch.where(mask, numbers, -1).cummax(0).values
    after = torch.where(mask, numbers, len(mask)).flip(0).cummin(0).values.flip(0)
    start, size = _starts(segments)[row], _sizes(segments)[row]
    place = start + torch.minimum(ends.long(), size).clamp(min=1) - 1
    safe = place.clamp(0, len(mask) - 1)
    found = torch.where(before[safe] >= start, before[safe], after[safe])
    inside = (found < start + size) & (found >= start) & (size > 0)
    return torch.where(inside, found, 0), inside


def _sizes(segments: TokenSegments) -> Tensor:
    """Return the tokens of each row, holes included."""
    return segments.row.bincount(minlength=segments.rows)


def _starts(segments: TokenSegments) -> Tensor:
    sizes = _sizes(segments)
    return sizes.cumsum(0) - sizes
