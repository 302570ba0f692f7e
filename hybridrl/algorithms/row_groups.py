"""Statistics over groups of rows that share a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.masking import as_float


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows by group; the group numbers may be any integers, in any order.

    Attributes:
        index: int64 ``[rows]``, the group of each row as a number from 0.
        size: int64 ``[rows]``, the number of rows in the group of each row.
        count: the number of groups.
    """

    index: Tensor
    size: Tensor
    count: int

    @classmethod
    def of(cls, groups: Tensor) -> Groups:
        _, index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
        return cls(index, sizes[index], sizes.numel())

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the group of each row, ``[rows]``."""
        totals = torch.zeros(self.count, dtype=x.dtype, device=x.device)
        return totals.index_add(0, self.index, x)[self.index]

    def max(self, x: Tensor) -> Tensor:
        """The largest value in the group of each row, ``[rows]``."""
        highest = torch.empty(self.count, dtype=x.dtype, device=x.device)
        highest = highest.scatter_reduce(0, self.index, x, "amax", include_self=False)
        return highest[self.index]

    def min(self, x: Tensor) -> Tensor:
        """The smallest value in the group of each row, ``[rows]``."""
        return -self.max(-x)

    def anchored(self, scores: Tensor) -> Tensor:
        """Scores above the lowest of their group.

        Every group-relative estimator ignores a shift of the whole group, and taking it out
        first makes a group of equal scores exactly 0. Without it the rounding of the mean
        (5e-7 for a score of 5) would be divided by a standard deviation of the same size.
        """
        (scores,) = as_float(scores)
        return scores - self.min(scores)

    def centred(self, scores: Tensor) -> Tensor:
        """Scores minus the mean of their group; exactly 0 where a group's scores are equal."""
        anchored = self.anchored(scores)
        return anchored - self.sum(anchored) / self.size

    def std(self, scores: Tensor) -> Tensor:
        """The unbiased standard deviation of the group of each row; 0 for a group of one."""
        squares = self.sum(self.centred(scores).square())
        return (squares / (self.size - 1).clamp(min=1)).sqrt()
