"""The samples that tokens belong to, in padded and packed layouts alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.errors import ConfigError, suggest_name


def as_float(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert tensors to one dtype: float32, or float64 if any of them has it."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def as_bool(mask: Tensor) -> Tensor:
    """Return the mask as bool; any non-zero entry counts as one."""
    return mask if mask.dtype == torch.bool else mask != 0


def apply_mask(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x on the mask and exactly 0 off it, in value and in gradient; without a mask, x."""
    return x if mask is None else torch.where(as_bool(mask), x, 0.0)


def check_known_name(setting: str, value: str, known: Iterable[str]) -> None:
    """Refuse a name that is not among the known ones, and suggest the nearest."""
    names = list(known)
    if value not in names:
        listed = ", ".join(f"`{name}`" for name in names)
        raise ConfigError(
            f"`{setting}` is `{value}`, which is not known; expected one of {listed}."
            + suggest_name(value, names)
        )


@dataclass(frozen=True, eq=False)
class TokenSegments:
    """The samples that a tensor of tokens is made of.

    Losses that need a whole sample (GSPO, GMPO, sequence-level weights) speak to tokens through
    it and so do not care whether the tokens are padded ``[rows, time]`` or packed ``[tokens]``.

    Attributes:
        row: integer tensor shaped like the tokens, the sample each token belongs to.
        mask: bool tensor of the same shape; tokens off the mask belong to nobody.
        rows: the number of samples, empty ones included.
    """

    row: Tensor
    mask: Tensor
    rows: int

    @classmethod
    def from_mask(cls, mask: Tensor) -> TokenSegments:
        """Build the segments of a padded ``[rows, time]`` mask; holes and empty rows are
        allowed."""
        if mask.dim() != 2:
            raise ConfigError(
                f"The mask has shape {tuple(mask.shape)}; a padded mask is [rows, time]. "
                "For packed tokens pass `segments=Segments.from_cu_seqlens(cu_seqlens)`."
            )
        rows = mask.shape[0]
        row = torch.arange(rows, device=mask.device).unsqueeze(-1).expand(mask.shape)
        return cls(row, as_bool(mask), rows)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, mask: Tensor | None = None) -> TokenSegments:
        """Build the segments of a packed ``[tokens]`` layout.

        cu_seqlens: integers ``[rows + 1]`` from 0 to the number of tokens; sample i is
        ``tokens[cu_seqlens[i]:cu_seqlens[i + 1]]``. mask: ``[tokens]``, for samples with holes;
        where it is on an accelerator, the bounds are better left on the host, which need not wait.
        """
        lengths = cu_seqlens.diff()
        rows = lengths.numel()
        row = torch.arange(rows, device=cu_seqlens.device).repeat_interleave(lengths.long())
        if mask is None:
            mask = torch.ones_like(row, dtype=torch.bool)
        elif mask.shape != row.shape:
            raise ConfigError(
                f"The mask has shape {tuple(mask.shape)} and `cu_seqlens` tells of "
                f"{row.numel()} tokens; a packed mask is [tokens]."
            )
        row = row.to(mask.device)
        return cls(row, as_bool(mask), rows)

    def within(self, mask: Tensor) -> TokenSegments:
        """Return the same samples with only those of their tokens that are also under the mask."""
        if mask.shape != self.mask.shape:
            raise ConfigError(
                f"The mask has shape {tuple(mask.shape)} and the segments tell of tokens of "
                f"shape {tuple(self.mask.shape)}; they must be made for one layout."
            )
        return TokenSegments(self.row, self.mask & as_bool(mask), self.rows)

    @property
    def ends(self) -> Tensor:
        """The last token under the mask of each sample, bool, shaped like the tokens."""
        mask, row = self.mask.reshape(-1), self.row.reshape(-1)
        places = torch.arange(row.numel(), device=row.device)
        last = torch.full((self.rows,), -1, device=row.device)
        last = last.scatter_reduce(0, row[mask], places[mask], "amax")
        ends = torch.zeros_like(mask)
        ends[last[last >= 0]] = True
        return ends.reshape(self.mask.shape)

    @property
    def lengths(self) -> Tensor:
        """The number of tokens under the mask of each sample, int64 ``[rows]``."""
        lengths = torch.zeros(self.rows, dtype=torch.long, device=self.row.device)
        return lengths.index_add(0, self.row.reshape(-1), self.mask.reshape(-1).long())

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over the tokens of each sample, ``[rows]``; 0 for an empty sample."""
        (x,) = as_float(x)
        totals = torch.zeros(self.rows, dtype=x.dtype, device=x.device)
        return totals.index_add(0, self.row.reshape(-1), apply_mask(x, self.mask).reshape(-1))

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of x over the tokens of each sample, ``[rows]``; 0 for an empty one."""
        return self.sum(x) / self.lengths.clamp(min=1)

    def last(self, x: Tensor) -> Tensor:
        """Return x at the last token of each sample, ``[rows]``; 0 for an empty sample."""
        (x,) = as_float(x)
        ends = self.ends
        none = torch.zeros(self.rows, dtype=x.dtype, device=x.device)
        return none.index_put((self.row[ends],), x[ends])

    def spread(self, values: Tensor) -> Tensor:
        """Put a per-sample value ``[rows]`` on each token of its sample; 0 off the mask."""
        (values,) = as_float(values)
        return apply_mask(values[self.row], self.mask)


def resolve_segments(mask: Tensor, segments: TokenSegments | None) -> TokenSegments:
    """Return the segments of a padded mask ``[rows, time]``, or `segments` within a packed mask."""
    return TokenSegments.from_mask(mask) if segments is None else segments.within(mask)


@dataclass(frozen=True, eq=False)
class RowGroups:
    """The rows of a batch by group; the group numbers may be any integers, in any order.

    Attributes:
        index: int64 ``[rows]``, the group of each row as a number from 0.
        size: int64 ``[rows]``, the number of rows in the group of each row.
        count: the number of groups.
    """

    index: Tensor
    size: Tensor
    count: int

    @classmethod
    def of(cls, groups: Tensor) -> RowGroups:
        _, index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
        return cls(index, sizes[index], sizes.numel())

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the group of each row, ``[rows]``."""
        totals = torch.zeros(self.count, dtype=x.dtype, device=x.device)
        return totals.index_add(0, self.index, x)[self.index]

    def max(self, x: Tensor) -> Tensor:
        """Return the largest value in the group of each row, ``[rows]``."""
        highest = torch.empty(self.count, dtype=x.dtype, device=x.device)
        highest = highest.scatter_reduce(0, self.index, x, "amax", include_self=False)
        return highest[self.index]

    def min(self, x: Tensor) -> Tensor:
        """Return the smallest value in the group of each row, ``[rows]``."""
        return -self.max(-x)

    def anchored(self, scores: Tensor) -> Tensor:
        """Return scores above the lowest of their group.

        Every group-relative estimator ignores a shift of the whole group, and taking it out
        first makes a group of equal scores exactly 0. Without it the rounding of the mean
        (5e-7 for a score of 5) would be divided by a standard deviation of the same size.
        """
        (scores,) = as_float(scores)
        return scores - self.min(scores)

    def centred(self, scores: Tensor) -> Tensor:
        """Return scores minus the mean of their group, exactly 0 where all scores are equal."""
        anchored = self.anchored(scores)
        return anchored - self.sum(anchored) / self.size

    def std(self, scores: Tensor) -> Tensor:
        """Return the unbiased standard deviation of the group of each row; 0 for a group of one."""
        squares = self.sum(self.centred(scores).square())
        return (squares / (self.size - 1).clamp(min=1)).sqrt()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of x over the mask, a scalar; 0 for an empty mask.

    x, mask: one shape, any number of dimensions. Differentiable in x.
    """
    (x,) = as_float(x)
    mask = as_bool(mask)
    return apply_mask(x, mask).sum() / mask.sum().clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Return the unbiased variance of x over the mask, a scalar; 0 when the mask has fewer than two
    ones."""
    mask = as_bool(mask)
    return _centre(x, mask).square().sum() / (mask.sum() - 1).clamp(min=1)


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) over the mask, 0 off it.

    A mask with fewer than two ones gives 0 everywhere: there is no spread to measure.
    """
    mask = as_bool(mask)
    whitened = _centre(x, mask) / (masked_var(x, mask) + 1e-8).sqrt()
    return apply_mask(whitened, mask & (mask.sum() >= 2))


def divide_by_std(x: Tensor, mask: Tensor) -> Tensor:
    """Return x / standard deviation over the mask, 0 off it: the sign of the mean is kept, and the
    unit of x does not matter.

    Where the mean is more than ten standard deviations it is divided to be ten: of values that are
    all alike the deviation is only their rounding.
    """
    (x,) = as_float(x)
    std, mean = masked_var(x, mask).sqrt(), masked_mean(x, mask)
    divisor = torch.maximum(std, mean.abs() / 10.0)
    return apply_mask(x, mask) / torch.where(divisor > 0, divisor, 1.0)


def _centre(x: Tensor, mask: Tensor) -> Tensor:
    """Return x minus its mean, 0 off the mask."""
    (x,) = as_float(x)
    centred = apply_mask(apply_mask(x, mask) - masked_mean(x, mask), mask)
    # The first mean is off by a rounding of x itself, which whitening a constant would blow up
    # by 1e4. The mean of what is left over is small, and so is its rounding.
    return apply_mask(centred - masked_mean(centred, mask), mask)
