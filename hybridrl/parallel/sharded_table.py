"""ShardedTable: a table of vectors by number, each on one rank, which ranks fetch and whose
gradients they send back with all-to-alls (as embeddings in G-Meta, arXiv:2401.04338).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.parallel.collectives import exchange_rows

_BETAS, _EPSILON = (0.9, 0.999), 1e-8


class _Route(NamedTuple):
    """The way of a rank's numbers to the ranks that hold their rows, and of others' to this one."""

    order: Tensor
    sent: list[int]
    received: list[int]
    asked: Tensor


class ShardedTable:
    """A table whose row with number n is on rank `n % ranks`. Rows are 0 until their first update;
    updates are Adam's, of the rows alone that have gradients.

    Args:
        width: Of a row.
        rate: Learning rate.
        group: The ranks; None: there is one.
    """

    def __init__(
        self, width: int, rate: float, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._width, self._rate, self._group, self._device = width, rate, group, device
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self._rank = 0 if group is None else dist.get_rank(group)
        self._places: dict[int, int] = {}
        self._state = torch.zeros(0, 3 * width + 1, device=device)  # row, two moments, updates

    def fetch(self, numbers: Tensor) -> Tensor:
        """Return the rows of these numbers, `[numbers, width]`. Collective."""
        route = self._make_route(numbers)
        found = torch.zeros(len(route.asked), self._width, device=self._device)
        places = [self._places.get(number, -1) for number in route.asked.tolist()]
        known = torch.tensor([place >= 0 for place in places], dtype=torch.bool)
        at = torch.tensor([place for place in places if place >= 0], dtype=torch.int64)
        found[known.to(self._device)] = self._state[at.to(self._device), : self._width]
        rows = torch.empty(len(numbers), self._width, device=self._device)
        rows[route.order] = self._exchange(found, route.received, route.sent)
        return rows

    def update(self, numbers: Tensor, gradients: Tensor) -> None:
        """Step rows by the sums of all ranks' gradients, `[numbers, width]`. Collective."""
        route = self._make_route(numbers)
        arrived = self._exchange(gradients[route.order], route.sent, route.received)
        unique, of_row = torch.unique(route.asked, return_inverse=True)
        total = torch.zeros(len(unique), self._width, device=self._device)
        total.index_add_(0, of_row, arrived)
        for number in unique.tolist():
            self._places.setdefault(number, len(self._places))
        at = torch.tensor([self._places[n] for n in unique.tolist()], dtype=torch.int64)
        lacking = len(self._places) - len(self._state)
        if lacking > 0:  # room grows by halves, so that few updates copy the table
            room = max(lacking, len(self._state) // 2)
            self._state = torch.cat([self._state, self._state.new_zeros(room, 3 * self._width + 1)])
        row, first, second, count = self._state[at].split([self._width] * 3 + [1], 1)
        count = count + 1
        first = torch.lerp(total, first, _BETAS[0])
        second = torch.lerp(total.square(), second, _BETAS[1])
        scale = (second / (1 - _BETAS[1] ** count)).sqrt() + _EPSILON
        row = row - self._rate * first / (1 - _BETAS[0] ** count) / scale
        self._state[at] = torch.cat([row, first, second, count], 1)

    def export(self) -> dict[str, Tensor]:
        """Return this rank's rows with their numbers, for `load` on any number of ranks."""
        numbers = torch.tensor(list(self._places), dtype=torch.int64)
        return {"numbers": numbers, "state": self._state[: len(numbers)].cpu().clone()}

    def load(self, numbers: Tensor, state: Tensor) -> None:
        """Add the rows that are this rank's, of `export` of any rank."""
        mine = torch.remainder(numbers, self._ranks) == self._rank
        begin = len(self._places)
        self._places |= {n: begin + place for place, n in enumerate(numbers[mine].tolist())}
        self._state = torch.cat([self._state[:begin], state[mine].to(self._device)])

    def clear(self) -> None:
        """Remove all rows."""
        self._places, self._state = {}, self._state[:0]

    def _make_route(self, numbers: Tensor) -> _Route:
        owners = torch.remainder(numbers, self._ranks)
        order = owners.argsort(stable=True)
        counts = torch.bincount(owners, minlength=self._ranks)
        if self._group is None:
            return _Route(order, [len(numbers)], [len(numbers)], numbers[order])
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._group)
        sizes = counts.tolist(), received.tolist()
        return _Route(order, *sizes, self._exchange(numbers[order], *sizes))

    def _exchange(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send `sent[r]` rows to each rank r and return those that arrive."""
        if self._group is None:
            return values
        return exchange_rows(values, sent, received, self._group)
