"""The turns of packed samples, and what each turn is worth by the rewards after it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms.advantages import discounted_cumsum
from hybridrl.algorithms.segments import TokenSegments


class PackedTurns(NamedTuple):
    """The turns of some samples, whose tokens are packed, one sample after the other.

    Attributes:
        rewards: ``[turns]``, of every turn, one sample after the other.
        sample: ``[turns]``, the sample of each.
        starts, ends: ``[samples]``, the first turn of each sample, and the last.
        run: ``[tokens]``, the run of neighbouring tokens of one turn that a token belongs to.
        turn: ``[runs]``, the turn of each run, as an index of ``rewards``. A turn without tokens
            has none.
    """

    rewards: Tensor
    sample: Tensor
    starts: Tensor
    ends: Tensor
    run: Tensor
    turn: Tensor

    @classmethod
    def of(
        cls, segments: TokenSegments, turn: Tensor, rewards: Tensor, counts: Tensor
    ) -> PackedTurns:
        """Find the turns of the samples of packed ``segments``.

        turn: ``[tokens]``, the number of each token's turn in its sample, from 0. counts:
        ``[samples]``, so many turns have a reward of their own, given in ``rewards`` one sample
        after the other; others are rewarded with 0.
        """
        sample, turn = segments.row, turn.long()
        number = torch.ones(segments.rows, dtype=torch.long).scatter_reduce(
            0, sample, turn + 1, "amax"
        )
        number = torch.maximum(number, counts)
        starts = number.cumsum(0) - number
        given = torch.arange(len(rewards)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        all_rewards = torch.zeros(int(number.sum()))
        all_rewards[starts.repeat_interleave(counts) + given] = rewards.float().nan_to_num()
        place = starts[sample] + turn
        begins = torch.ones(len(place), dtype=torch.bool)
        begins[1:] = place[1:] != place[:-1]
        return cls(
            all_rewards,
            torch.arange(segments.rows).repeat_interleave(number),
            starts,
            starts + number - 1,
            begins.long().cumsum(0) - 1,
            place[begins],
        )

    def segments(self, mask: Tensor) -> TokenSegments:
        """Return segments in which each run is a sample; mask: ``[tokens]``."""
        return TokenSegments(self.run, mask, len(self.turn))

    def placed(self, mask: Tensor) -> Tensor:
        """Place the reward of each turn on its last token under the mask, ``[tokens]``."""
        ends = self.segments(mask).ends
        return torch.where(ends, self.rewards[self.turn][self.run], 0.0)

    def to_go(self, scores: Tensor, penalty: Tensor, gamma: float) -> Tensor:
        """Compute the rewards from each run's turn on, ``[runs]``, discounted from turn to turn.

        scores: ``[samples]``; what they have beyond the rewards of the turns is the last turn's.
        penalty: ``[runs]``, what is taken off the reward of the run's turn.
        """
        rest = scores - torch.zeros_like(scores).index_add(0, self.sample, self.rewards)
        rewards = self.rewards.index_add(0, self.ends, rest.float())
        rewards = rewards.index_add(0, self.turn, -penalty.float())
        return discounted_cumsum(rewards, self.sample, gamma)[self.turn]

    def groups(self, groups: Tensor) -> Tensor:
        """Return group ids of runs, ``[runs]``: equal for like turns in samples of one group, whose
        ids are ``groups``, ``[samples]``."""
        sample = self.sample[self.turn]
        pairs = torch.stack([groups[sample], self.turn - self.starts[sample]], 1)
        found: Tensor = torch.unique(pairs, dim=0, return_inverse=True)[1]
        return found
