"""Which rows of a table: chosen by number, repeated, or a part of them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from hybridrl.batch.row_balancing import balance_rows
from hybridrl.controller.group_call import Rows
from hybridrl.errors import DataError

if TYPE_CHECKING:
    from hybridrl.controller.table_expression import TableExpression

BALANCE_TOLERANCE = 1.02
"""The largest ratio of a part's tokens to the mean for which parts are blocks of consecutive rows;
above it, rows are assigned one by one, which copies them."""


@dataclass(frozen=True)
class IndexSelection:
    """A selection of rows by index.

    Attributes:
        of: How many rows the table must have; None: as many as the numbers need.
    """

    numbers: Rows
    of: int | None = None

    def known_rows(self, table: TableExpression) -> int | None:
        return len(self.numbers)

    def rows(self, table: TableExpression) -> Rows:
        count = table.num_rows()
        if self.of not in (None, count):
            raise DataError(
                f"A mask of {self.of} booleans cannot choose among {count} rows: it needs one for "
                "each."
            )
        if len(self.numbers) and self.numbers.max() >= count:
            raise DataError(
                f"There is no row {self.numbers.max()} of a batch of {count} rows, which are "
                "counted from 0."
            )
        return self.numbers


@dataclass(frozen=True)
class RepeatSelection:
    """A selection of every row `times` times, copies of a row next to each other."""

    times: int

    def known_rows(self, table: TableExpression) -> int | None:
        return None if (known := table.known_rows) is None else known * self.times

    def rows(self, table: TableExpression) -> Rows:
        return np.repeat(np.arange(table.num_rows()), self.times)


@dataclass(frozen=True)
class PartitionSelection:
    """A selection of part `index` of `parts`, its rows ascending. Groups of `rows_together`
    neighbouring rows are never separated. Every rank computes the same partition from the same
    lengths."""

    index: int
    parts: int
    balance: Literal["rows", "tokens"] = "rows"
    together: int = 1

    def known_rows(self, table: TableExpression) -> int | None:
        if self.balance == "tokens" or table.known_rows is None:
            return None
        start, stop = self._block(table.known_rows // self.together)
        return (stop - start) * self.together

    def rows(self, table: TableExpression) -> Rows:
        count, rest = divmod(table.num_rows(), self.together)
        if rest:
            raise DataError(
                f"{count * self.together + rest} rows cannot be dealt out {self.together} at a "
                "time."
            )
        if self.balance == "rows" or self.parts == 1 or not count:
            units = np.arange(*self._block(count))
        else:
            tokens = sum(table.tokens().values(), start=np.zeros(count * self.together, np.int64))
            units = self._balanced(tokens.reshape(count, self.together).sum(1))
        return (units[:, None] * self.together + np.arange(self.together)).reshape(-1)

    def _block(self, count: int) -> tuple[int, int]:
        """Return the first unit of the part and the first one after it, if all parts have equally
        many units."""
        return count * self.index // self.parts, count * (self.index + 1) // self.parts

    def _balanced(self, tokens: Rows) -> Rows:
        """Return the units of the part if all parts have about equally many tokens."""
        count = len(tokens)
        costs = tokens + 1  # so that rows without tokens spread evenly
        ends = np.cumsum(costs)
        goals = ends[-1] * np.arange(1, self.parts) / self.parts
        edges = np.concatenate([[0], np.searchsorted(ends, goals, side="left") + 1, [count]])
        sizes = np.diff(np.concatenate([[0], ends])[np.minimum(edges, count)])
        if sizes.max() <= BALANCE_TOLERANCE * sizes.mean():
            return np.arange(edges[self.index], edges[self.index + 1])  # read without copying
        return np.asarray(balance_rows(costs.tolist(), self.parts)[self.index], dtype=np.int64)
