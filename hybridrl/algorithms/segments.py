"""Which token belongs to which sample, for padded and packed layouts alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.masking import as_bool, as_float, on_mask
from hybridrl.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Segments:
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
    def from_mask(cls, mask: Tensor) -> Segments:
        """Samples of a padded ``[rows, time]`` layout; the mask may have holes and empty rows."""
        if mask.dim() != 2:
            raise ConfigError(
                f"The mask has shape {tuple(mask.shape)}; a padded mask is [rows, time]. "
                "For packed tokens pass `segments=Segments.from_cu_seqlens(cu_seqlens)`."
            )
        rows = mask.shape[0]
        row = torch.arange(rows, device=mask.device).unsqueeze(-1).expand(mask.shape)
        return cls(row, as_bool(mask), rows)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, mask: Tensor | None = None) -> Segments:
        """Samples of a packed ``[tokens]`` layout.

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

    def within(self, mask: Tensor) -> Segments:
        """The same samples with only those of their tokens that are also under the mask."""
        if mask.shape != self.mask.shape:
            raise ConfigError(
                f"The mask has shape {tuple(mask.shape)} and the segments tell of tokens of "
                f"shape {tuple(self.mask.shape)}; they must be made for one layout."
            )
        return Segments(self.row, self.mask & as_bool(mask), self.rows)

    @property
    def ends(self) -> Tensor:
        """Bool, shaped like the tokens: the last token under the mask of each sample."""
        mask, row = self.mask.reshape(-1), self.row.reshape(-1)
        places = torch.arange(row.numel(), device=row.device)
        last = torch.full((self.rows,), -1, device=row.device)
        last = last.scatter_reduce(0, row[mask], places[mask], "amax")
        ends = torch.zeros_like(mask)
        ends[last[last >= 0]] = True
        return ends.reshape(self.mask.shape)

    @property
    def lengths(self) -> Tensor:
        """Tokens under the mask of each sample, int64 ``[rows]``."""
        lengths = torch.zeros(self.rows, dtype=torch.long, device=self.row.device)
        return lengths.index_add(0, self.row.reshape(-1), self.mask.reshape(-1).long())

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the tokens of each sample, ``[rows]``; 0 for an empty sample."""
        (x,) = as_float(x)
        totals = torch.zeros(self.rows, dtype=x.dtype, device=x.device)
        return totals.index_add(0, self.row.reshape(-1), on_mask(x, self.mask).reshape(-1))

    def mean(self, x: Tensor) -> Tensor:
        """The mean of x over the tokens of each sample, ``[rows]``; 0 for an empty sample."""
        return self.sum(x) / self.lengths.clamp(min=1)

    def last(self, x: Tensor) -> Tensor:
        """x at the last token of each sample, ``[rows]``; 0 for an empty sample."""
        (x,) = as_float(x)
        ends = self.ends
        none = torch.zeros(self.rows, dtype=x.dtype, device=x.device)
        return none.index_put((self.row[ends],), x[ends])

    def spread(self, values: Tensor) -> Tensor:
        """A per-sample value ``[rows]`` on each token of its sample; 0 off the mask."""
        (values,) = as_float(values)
        return on_mask(values[self.row], self.mask)


def samples_of(mask: Tensor, segments: Segments | None) -> Segments:
    """The samples of a padded mask ``[rows, time]``, or of a packed one, with its segments."""
    return Segments.from_mask(mask) if segments is None else segments.within(mask)
