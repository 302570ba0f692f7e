"""Metrics of an update: summed over micro-batches, then over ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

BY_ROW = "_by_row"


class UpdateMetrics:
    """Sums over micro-batches, then over ranks, in one small collective each for sum and max.
    Averages are over tokens; of metrics named `*_by_row`, over rows that have any."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._tops: dict[str, Tensor] = {}

    def add(self, loss: Tensor, metrics: Mapping[str, Tensor], mask: Tensor, rows: Tensor) -> None:
        self._add("loss", loss.detach())
        self._add("tokens", mask.sum())
        self._add("rows", rows.sum())
        for name, values in metrics.items():
            if name.endswith("_max"):
                top = values.masked_fill(~mask, 0.0).max() if len(values) else values.new_zeros(())
                self._tops[name] = torch.maximum(self._tops.get(name, top), top)
            else:
                where = rows if name.endswith(BY_ROW) else mask
                self._add(name, torch.where(where, values, 0.0).sum())

    @property
    def loss(self) -> float:
        """Of this rank alone."""
        return float(self._sums.get("loss", 0.0))

    def reduce(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        sums = torch.tensor([float(v) for v in self._sums.values()], dtype=torch.float64)
        if group is not None:
            dist.all_reduce(sums, group=group)
        found = dict(zip(self._sums, sums.tolist(), strict=True))
        result = {name: found.pop(name) for name in ("loss", "tokens", "rows")}
        for name, total in found.items():
            count = result["rows"] if name.endswith(BY_ROW) else result["tokens"]
            result[name.removesuffix(BY_ROW)] = total / max(1.0, count)
        if self._tops:
            tops = torch.tensor([float(v) for v in self._tops.values()], dtype=torch.float64)
            if group is not None:
                dist.all_reduce(tops, dist.ReduceOp.MAX, group=group)
            result |= dict(zip(self._tops, tops.tolist(), strict=True))
        return result

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value
