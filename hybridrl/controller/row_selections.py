"""Row selections: which rows of a table a rank of a group call reads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from hybridrl.batch.row_balancing import balance_rows, compute_row_costs
from hybridrl.controller.group_call import Rows
from hybridrl.errors import DataError

if TYPE_CHECKING:
    from hybridrl.controller.table_expression import TableExpression


BALANCE_TOLERANCE = 1.02
"""The largest ratio of a part's cost to the mean for which parts are blocks of consecutive rows;
above it, rows are assigned one by one, which copies them."""


@dataclass(frozen=True)
class IndexSelection:
    """A selection of rows by index.

    Attributes:
        of: How many rows the table must have; None: as many as the numbers need.
        copies: So many neighbouring rows are copies of one; see `TableExpression.copies`.
    """

    numbers: Rows
    of: int | None = None
    copies: int = 1

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
    lengths.

    Attributes:
        attention_length: With `balance="tokens"`, see `compute_row_costs`.
        sharing: Likewise, so many neighbouring rows share the work of their prompt, as long as they
            are on one rank.
        group_column: Neighbouring rows with one value in this column are never separated either.
    """

    index: int
    parts: int
    balance: Literal["rows", "tokens"] = "rows"
    together: int = 1
    attention_length: float = math.inf
    sharing: int = 1
    group_column: str | None = None

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
        if self.group_column is not None and self.parts > 1 and count:
            return self._groups_of(table, self.group_column)
        if self.balance == "tokens" and self.parts > 1 and count:
            return self._deal_by_tokens(table.tokens(), count * self.together)
        return _list_rows(np.arange(*self._block(count)), self.together)

    def _groups_of(self, table: TableExpression, column: str) -> Rows:
        """Return the rows of the groups of the part."""
        found = table.read(np.arange(table.num_rows()), frozenset({column}))
        if found is None:
            raise DataError(f"Rows are dealt out by the column `{column}`, which is not there.")
        starts = np.flatnonzero(np.diff(found[column].numpy(), prepend=np.nan) != 0)
        ends = np.append(starts[1:], len(found))
        tokens = sum(table.tokens().values(), start=np.zeros(len(found), np.int64))
        costs = np.add.reduceat(compute_row_costs(tokens, self.attention_length), starts)
        mine = [np.arange(starts[unit], ends[unit]) for unit in self._deal(costs, 1)[self.index]]
        return np.concatenate([np.empty(0, np.int64), *mine])

    def _block(self, count: int) -> tuple[int, int]:
        """Return the first unit of the part and the first one after it, if all parts have equally
        many units."""
        return count * self.index // self.parts, count * (self.index + 1) // self.parts

    def _deal_by_tokens(self, lengths: Mapping[str, Rows], count: int) -> Rows:
        """Return the rows of the part if all parts cost about equally much. Rows that share a
        prompt stay on one rank unless the costliest is done sooner without that."""
        costs = compute_row_costs(
            sum(lengths.values(), np.zeros(count, np.int64)), self.attention_length
        )
        prompts = lengths.get("prompt_ids", np.zeros(count, np.int64))
        spared = compute_row_costs(prompts, self.attention_length)
        group = np.arange(count) // self.sharing

        def longest(parts: list[Rows]) -> float:
            repeated = [np.diff(group[rows], prepend=-1) == 0 for rows in parts]
            each = zip(parts, repeated, strict=True)
            return max(float(costs[rows].sum() - spared[rows][same].sum()) for rows, same in each)

        ways = [self.together]
        if self.sharing > self.together and count % self.sharing == 0:
            ways.append(self.sharing)
        even = costs - spared * (1 - 1 / self.sharing)
        dealt = [self._deal(even.reshape(-1, way).sum(1), way) for way in ways]
        return min(dealt, key=longest)[self.index]

    def _deal(self, costs: npt.NDArray[np.float64], together: int) -> list[Rows]:
        """Return the rows of each part if all parts cost about equally much, by the costs of units
        of `together` rows."""
        count = len(costs)
        costs = costs + 1  # so that rows without tokens spread evenly
        ends = np.cumsum(costs)
        goals = ends[-1] * np.arange(1, self.parts) / self.parts
        edges = np.concatenate([[0], np.searchsorted(ends, goals, side="left") + 1, [count]])
        edges = np.minimum(edges, count)
        sizes = np.diff(np.concatenate([[0], ends])[edges])
        if sizes.max() <= BALANCE_TOLERANCE * sizes.mean():
            units = [np.arange(*edge) for edge in itertools.pairwise(edges)]  # read without copying
        else:
            units = [np.asarray(x, np.int64) for x in balance_rows(costs.tolist(), self.parts)]
        return [_list_rows(one, together) for one in units]


def _list_rows(units: Rows, together: int) -> Rows:
    """Return the rows of units of `together` neighbouring rows."""
    return (units[:, None] * together + np.arange(together)).reshape(-1)
