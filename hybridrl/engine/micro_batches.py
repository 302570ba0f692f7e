"""Micro-batches of an update: the rows of each, the columns that a loss reads, and the metrics
summed over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.errors import ConfigError, DataError, suggest_name
from hybridrl.parallel.collectives import reduce_over

_COLUMN_SOURCES = {
    "response_mask": "the generation, or the data of `update_supervised`",
    "loss_weights": "`hybridrl.trainers.update_columns.loss_weights`, applied to the batch",
    "advantages": "an advantage estimator, applied to the scores (`batch.apply`)",
    "log_probs": "`actor.compute_log_prob`",
    "rollout_log_probs": "the generation",
    "ref_log_probs": "`reference.compute_ref_log_prob`",
    "values": "`critic.compute_values`",
    "cost_values": "`cost_critic.compute_values`",
    "returns": "an advantage estimator with values, such as `gae`",
    "cost_returns": "an advantage estimator with values, such as `gae`",
}
"""Where the columns come from that the library's losses read."""


def pack_rows(
    lengths: Iterable[int],
    budget: int,
    *,
    setting: str = "actor.tokens_per_microbatch",
    padded: bool = False,
    groups: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Pack rows into few lists of at most `budget` tokens each: first-fit decreasing, or for
    `padded` rows, which count as the longest of their list, longest first.

    lengths: tokens of each row. groups: what is packed are groups of these rows. Returns lists of
    row indices, each ascending, that hold every row once; no rows give no lists. At most 11/9 of
    the fewest possible lists, plus one.

    Raises `ConfigError` for a row longer than the budget; the message names the row, or the rows of
    the group, and ``setting``, the setting that the budget came from.
    """
    sizes = [int(length) for length in lengths]
    for row, size in enumerate(sizes):
        if size > budget:
            rows = [row] if groups is None else groups[row]
            who, them = f"Row {rows[0]}", "row"
            if len(rows) > 1:
                who, them = f"The group of rows {rows[0]} to {rows[-1]}", "rows"
            raise ConfigError(
                f"{who} has {size} tokens, more than `{setting}` = {budget} allows in one "
                f"micro-batch. Raise `{setting}` to at least {size}, or shorten the {them}."
            )
    if padded:
        return _rectangles(sizes, budget)
    room = np.full(len(sizes), budget)  # in each list, opened or not
    lists: list[list[int]] = []
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        first = int(np.argmax(room[: len(lists) + 1] >= sizes[row]))
        if first == len(lists):
            lists.append([])
        lists[first].append(row)
        room[first] -= sizes[row]
    return [sorted(rows) for rows in lists]


def _rectangles(sizes: Sequence[int], budget: int) -> list[list[int]]:
    lists: list[list[int]] = []
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        if lists and sizes[lists[-1][0]] * (len(lists[-1]) + 1) <= budget:
            lists[-1].append(row)
        else:
            lists.append([row])
    return [sorted(rows) for rows in lists]


class TokenColumns(Mapping[str, Tensor]):
    """A mapping of every numeric column to `[response tokens]` on the device: token-level columns
    as they are, per-sample numbers repeated over the sample's tokens. They are copies, so a loss
    may change them.

    Raises:
        DataError: when a column is read that is not there, or does not have a number for each
            response token; names it, and what makes it.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        lengths = torch.from_numpy(batch.lengths("response_ids"))
        self._columns: dict[str, Tensor] = {}
        self._unfit: dict[str, str] = {}
        for name in batch.columns:
            values = batch[name]
            if isinstance(values, Tensor):
                self._columns[name] = values.repeat_interleave(lengths).to(device)
            elif isinstance(values, RaggedColumn):
                if torch.equal(values.lengths, lengths):
                    self._columns[name] = values.values.to(device, copy=True)
                else:
                    self._unfit[name] = _difference(values.lengths, lengths)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._columns:
            raise self._missing(name)
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        # Leaving it out would change what is learned.
        if name in self._unfit and name in _COLUMN_SOURCES:
            raise self._missing(str(name))
        return name in self._columns

    def get(self, name: str, default: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        return self._columns[name] if name in self else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def _missing(self, name: str) -> DataError:
        maker = f" It is made by {_COLUMN_SOURCES[name]}." if name in _COLUMN_SOURCES else ""
        if name in self._unfit:
            return DataError(
                f"The loss reads the column `{name}`, which does not have a number for each "
                f"response token: {self._unfit[name]}.{maker}"
            )
        return DataError(
            f"The loss reads the column `{name}`, which the batch of this update does not have; it "
            f"has {', '.join(self._columns)}.{maker}{suggest_name(name, self._columns)}"
        )


def _difference(found: Tensor, wanted: Tensor) -> str:
    row = int((found != wanted).nonzero()[0])
    return f"a row has {int(found[row])} values and a response of {int(wanted[row])} tokens"


BY_ROW = "_by_row"


class UpdateMetrics:
    """Sums of metrics over micro-batches, then over ranks in one small collective each for sums and
    maxima. Averages are over tokens; for metrics named `*_by_row`, over rows with at least one
    token."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._tops: dict[str, Tensor] = {}

    def add(self, loss: Tensor, metrics: Mapping[str, Tensor], mask: Tensor, rows: Tensor) -> None:
        self._add("loss", loss.detach())
        self._add("tokens", mask.sum())
        self._add("rows", rows.sum())
        for name, values in metrics.items():
            if name.endswith("_max"):
                lowest = values.new_full((), -math.inf)
                top = values.masked_fill(~mask, -math.inf).max() if len(values) else lowest
                self._tops[name] = torch.maximum(self._tops.get(name, top), top)
            else:
                where = rows if name.endswith(BY_ROW) else mask
                self._add(name, torch.where(where, values, 0.0).sum())

    @property
    def loss(self) -> float:
        """The loss of this rank alone."""
        return float(self._sums.get("loss", 0.0))

    def reduce(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        sums = torch.tensor([float(v) for v in self._sums.values()], dtype=torch.float64)
        found = dict(zip(self._sums, reduce_over(group, sums).tolist(), strict=True))
        result = {name: found.pop(name) for name in ("loss", "tokens", "rows")}
        for name, total in found.items():
            count = result["rows"] if name.endswith(BY_ROW) else result["tokens"]
            result[name.removesuffix(BY_ROW)] = total / max(1.0, count)
        if self._tops:
            tops = torch.tensor([float(v) for v in self._tops.values()], dtype=torch.float64)
            reduce_over(group, tops, dist.ReduceOp.MAX)
            tops[tops == -math.inf] = 0.0  # there were no tokens
            result |= dict(zip(self._tops, tops.tolist(), strict=True))
        return result

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value
