"""Zigzag: a split of packed samples over a ring of ranks that balances the work of causal
attention.

A token sees all tokens before it, so the last part of a sample costs several times the first. Each
sample is cut in 2N chunks, chunk k from floor(L k / 2N) to floor(L (k + 1) / 2N), and ring rank r
of N holds chunks r and 2N - 1 - r: an early and a late one, which together cost about the same on
every rank. Lengths need not be divisible; of a sample shorter than the ring some ranks hold
nothing. Everything follows from the lengths alone, so all ranks know it without a message.

Source: the `zigzag` layout of ring attention, as in "USP: A Unified Sequence Parallelism Approach
for Long Context Generative AI" (Fang and Zhao, 2024), applied to each sample of a packed row.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.models.token_ranges import concatenate_ranges


@dataclass(frozen=True, eq=False)
class RingRow:
    """The tokens of one ring rank: for each sample an early and a late chunk.

    Attributes:
        places: int64 `[tokens]`, their places in the packed row, ascending.
        early: int64 `[samples]`, tokens of each sample's early chunk.
        late: int64 `[samples]`, tokens of each sample's late chunk.
    """

    places: Tensor
    early: Tensor
    late: Tensor

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each sample on this ring rank, int64 `[samples]`."""
        return self.early + self.late


def split_over_ring(cu_seqlens: Tensor, ring: int) -> list[RingRow]:
    """Return the row of each of `ring` ranks, for samples with bounds `cu_seqlens`, int64 `[samples
    + 1]`. Together the rows hold every position once."""
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    chunks = 2 * ring
    bounds = lengths[:, None] * torch.arange(chunks + 1) // chunks
    sizes = bounds.diff(dim=1)
    rows = []
    for rank in range(ring):
        mine = [rank, chunks - 1 - rank]
        places = concatenate_ranges(
            (starts[:, None] + bounds[:, mine]).reshape(-1), sizes[:, mine].reshape(-1)
        )
        rows.append(RingRow(places, sizes[:, mine[0]], sizes[:, mine[1]]))
    return rows


def split_bounds(tokens: int, parts: int) -> list[int]:
    """Return the `parts + 1` bounds of consecutive, nearly equal parts of `tokens`."""
    return [tokens * part // parts for part in range(parts + 1)]


def compute_rank_positions(rows: list[RingRow], ulysses: int) -> list[Tensor]:
    """Return the positions in the packed row of each rank's tokens when each ring rank's row is
    split into consecutive parts over `ulysses` ranks. Ranks of one ring rank follow each other."""
    found = []
    for row in rows:
        bounds = split_bounds(len(row.places), ulysses)
        found += [row.places[start:stop] for start, stop in itertools.pairwise(bounds)]
    return found
