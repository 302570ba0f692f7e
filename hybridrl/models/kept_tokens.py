"""KeptTokens: for each response token, the part of the vocabulary that it was chosen from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.batch.batch import Batch
from hybridrl.batch.kept_sets import KEPT_SETS
from hybridrl.errors import DataError


class KeptTokens(NamedTuple):
    """The sets of a micro-batch's response tokens.

    Attributes:
        counts: `[tokens]`, see `hybridrl.batch.kept_sets.TokenSet`.
        ids: Of all tokens, one after the other.
        bounds: `[tokens + 1]`, on the CPU: token i has `ids[bounds[i]:bounds[i + 1]]`.
    """

    counts: Tensor
    ids: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> KeptTokens | None:
        """Read the column `kept_sets`; None where no token was left out anywhere.

        Raises:
            DataError: if it does not have a set for each response token.
        """
        values, cu_seqlens = batch.ragged(KEPT_SETS)
        lengths = torch.from_numpy(batch.lengths("response_ids"))
        sizes = cu_seqlens.diff()
        row = torch.arange(len(batch)).repeat_interleave(sizes)
        is_count = torch.arange(len(values)) - cu_seqlens[row] < lengths[row]
        counts = values[is_count].long()
        of_rows = torch.zeros(len(batch), dtype=torch.int64)
        of_rows.index_add_(0, row[is_count], 1 + counts.abs())
        if not torch.equal(of_rows, sizes):
            raise DataError(
                f"The column `{KEPT_SETS}` does not have a set for each response token: rows of "
                f"{sizes[:3].tolist()} numbers for {lengths[:3].tolist()} tokens."
            )
        return cls._build(counts, values[~is_count].long(), device) if counts.any() else None

    @classmethod
    def _build(cls, counts: Tensor, ids: Tensor, device: torch.device) -> KeptTokens:
        bounds = torch.nn.functional.pad(counts.abs().cumsum(0), (1, 0))
        return cls(counts.to(device), ids.to(device), bounds)

    def select(self, tokens: Tensor) -> KeptTokens:
        """Return the sets of these tokens: their numbers, ascending, or a mask."""
        counts, ids = self.counts.cpu(), self.ids.cpu()
        is_mine = torch.zeros(len(counts), dtype=torch.bool)
        is_mine[tokens.cpu()] = True
        of_ids = is_mine.repeat_interleave(counts.abs())
        return self._build(counts[is_mine], ids[of_ids], self.counts.device)

    def find_left_out(self, tokens: slice, start: int, stop: int) -> Tensor:
        """Return `[tokens, ids]`, which of the token ids from `start` to `stop` could not be
        chosen in the place of each of these tokens."""
        counts = self.counts[tokens]
        ids = self.ids[int(self.bounds[tokens.start]) : int(self.bounds[tokens.stop])] - start
        rows = torch.arange(len(counts), device=ids.device)
        rows = rows.repeat_interleave(counts.abs(), output_size=len(ids))
        width = stop - start
        # One column more takes what lies elsewhere, so that a GPU need not be waited for.
        marked = torch.zeros(len(counts), width + 1, dtype=torch.bool, device=ids.device)
        marked[rows, torch.where((ids >= 0) & (ids < width), ids, width)] = True
        return marked[:, :width] ^ (counts > 0)[:, None]
