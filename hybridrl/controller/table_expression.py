"""Tables of samples whose rows lie where they were made, as expressions.

A table is what calls returned: joined, chosen from, one below the other. Nothing here holds rows;
an expression is evaluated where it is needed, by `read`, from what the shards say of themselves
(`ShardInfo`, small) and the rows that are fetched. The driver knows of most tables, before they
are made, how many rows and which columns they will have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from glob import escape
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from hybridrl.batch.batch import Batch
from hybridrl.controller.group_call import (
    TOKEN_COLUMNS,
    ExpectedColumns,
    RequestedColumns,
    Rows,
    ShardedResult,
    ShardInfo,
)
from hybridrl.controller.row_selections import IndexSelection, PartitionSelection, RepeatSelection
from hybridrl.errors import DataError

_Value = TypeVar("_Value")


class _AwaitedProperty(Generic[_Value]):
    """A cached property whose value may have to be waited for. The lock that `cached_property` has
    before Python 3.12 is one for all tables: a thread that waits with it would stop the thread of
    the same host that has to return what is waited for."""

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        self._compute = compute

    def __get__(self, table: TableExpression, kind: type[TableExpression]) -> _Value:
        value = vars(table)[self._compute.__name__] = self._compute(table)
        return value


class TableExpression(ABC):
    """An expression for a table of samples."""

    @property
    @abstractmethod
    def columns(self) -> ExpectedColumns:
        """The columns, as far as they are known before the calls have run."""

    @property
    @abstractmethod
    def known_rows(self) -> int | None:
        """The number of rows, if it is known before the calls have run."""

    @property
    def copies(self) -> int:
        """The number of neighbouring rows that are copies of one row, made by `repeat`."""
        return 1

    @abstractmethod
    def num_rows(self) -> int:
        """Return the number of rows; waits until it is known."""

    @abstractmethod
    def tokens(self) -> dict[str, Rows]:
        """Return the tokens per row of the counted columns."""

    @abstractmethod
    def read(self, rows: Rows, names: frozenset[str] | None) -> Batch | None:
        """Read these rows; return None if the table has none of the requested columns."""

    @abstractmethod
    def shards(self) -> list[ShardedResult]:
        """Return the result of every call in the expression."""

    def needed(self, wanted: RequestedColumns) -> TableExpression | None:
        """Return the part of the expression that may hold requested columns; None if there is
        none."""
        return self if wanted.may_be_in(self.columns) else None

    def joined(self) -> list[TableExpression]:
        """Return the tables that stand side by side in this one."""
        return [self]

    def with_part(self, whole: ResultTable, part: ResultTable) -> TableExpression:
        """Return the expression with `part` in place of the streamed table `whole`: what can be
        read before the other parts exist."""
        return part if self is whole else self

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class ResultTable(TableExpression):
    """The rows that one call returned or, of a `streamed` table, several calls."""

    results: tuple[ShardedResult, ...]
    streamed: bool = False

    @property
    def columns(self) -> ExpectedColumns:
        return self.results[0].columns

    @property
    def known_rows(self) -> int | None:
        return self.results[0].rows

    @_AwaitedProperty
    def _infos(self) -> list[tuple[ShardedResult, int, ShardInfo]]:
        return [
            (result, index, info)
            for result in self.results
            for index, info in enumerate(result.infos())
        ]

    def num_rows(self) -> int:
        if self.known_rows is not None:
            return self.known_rows
        total = self._infos[0][2].total
        return sum(len(info.rows) for _, _, info in self._infos) if total is None else total

    def bits(self) -> list[ResultTable]:
        """Return the parts of a streamed table, in the order of their calls."""
        return [ResultTable((result,)) for result in self.results]

    def present(self) -> Rows:
        """Return the indices of the rows in these shards, ascending."""
        return np.sort(np.concatenate([info.rows for _, _, info in self._infos]))

    def tokens(self) -> dict[str, Rows]:
        found: dict[str, Rows] = {}
        for _, _, info in self._infos:
            for name, counts in info.tokens.items():
                if name not in found:
                    found[name] = np.zeros(self.num_rows(), np.int64)
                found[name][info.rows] = counts
        return found

    def read(self, rows: Rows, names: frozenset[str] | None) -> Batch | None:
        schema = _merge_schemas([info.schema for _, _, info in self._infos])
        chosen = [name for name in schema.names if names is None or name in names]
        if not chosen:
            return None
        total = self.num_rows()
        owner, place = np.full(total, -1, np.int64), np.empty(total, np.int64)
        for number, (_, _, info) in enumerate(self._infos):
            owner[info.rows] = number
            place[info.rows] = np.arange(len(info.rows))
        if len(missing := rows[owner[rows] < 0]):
            raise DataError(
                f"Row {missing[0]} of {total} was made by no rank: between them, the ranks of a "
                "call return every row of its table."
            )
        # A table without rows in front tells the columns' types, of those too that a shard lacks.
        pieces = [Batch(pa.schema([schema.field(name) for name in chosen]).empty_table())]
        order = []
        for number, (result, index, info) in enumerate(self._infos):
            wanted = np.flatnonzero(owner[rows] == number)
            if len(wanted):
                there = [name for name in chosen if name in info.schema.names]
                pieces.append(result.read(index, place[rows[wanted]], there))
                order.append(wanted)
        if len(order) == 1 and pieces[1].table.schema.equals(pieces[0].table.schema):
            return pieces[1]
        batch = Batch.concat(pieces, fill_missing=True)
        return batch if len(order) < 2 else batch.take(np.argsort(np.concatenate(order)))

    def shards(self) -> list[ShardedResult]:
        return list(self.results)


@dataclass(frozen=True, eq=False)
class JoinedTable(TableExpression):
    """Two tables side by side, row by row; the right one wins where both have a column."""

    left: TableExpression
    right: TableExpression

    def __post_init__(self) -> None:
        left, right = self.left.known_rows, self.right.known_rows
        if left is not None and right is not None:
            _check_same_row_count(left, right)

    @property
    def columns(self) -> ExpectedColumns:
        return self.left.columns | self.right.columns

    @property
    def known_rows(self) -> int | None:
        left, right = self.left.known_rows, self.right.known_rows
        return right if left is None else left

    @property
    def copies(self) -> int:
        return max(self.left.copies, self.right.copies)

    def num_rows(self) -> int:
        return self._checked_rows() if (known := self.known_rows) is None else known

    def tokens(self) -> dict[str, Rows]:
        self._checked_rows()
        return self.left.tokens() | self.right.tokens()

    def read(self, rows: Rows, names: frozenset[str] | None) -> Batch | None:
        self._checked_rows()
        sides = [side.read(rows, names) for side in (self.left, self.right)]
        found = [side for side in sides if side is not None]
        return found[0] | found[1] if len(found) == 2 else (found[0] if found else None)

    def shards(self) -> list[ShardedResult]:
        return self.left.shards() + self.right.shards()

    def needed(self, wanted: RequestedColumns) -> TableExpression | None:
        right = self.right.needed(wanted)
        left = self.left.needed(wanted.without(self.right.columns.certain))
        return JoinedTable(left, right) if left and right else left or right

    def joined(self) -> list[TableExpression]:
        return self.left.joined() + self.right.joined()

    def with_part(self, whole: ResultTable, part: ResultTable) -> TableExpression:
        return JoinedTable(self.left.with_part(whole, part), self.right.with_part(whole, part))

    def _checked_rows(self) -> int:
        """Return the number of rows, which must be the same on both sides; waits until both are
        known."""
        rows = self.left.num_rows()
        _check_same_row_count(rows, self.right.num_rows())
        return rows


@dataclass(frozen=True, eq=False)
class ConcatenatedTable(TableExpression):
    """Tables with the same columns, one below the other."""

    tables: tuple[TableExpression, ...]

    @property
    def columns(self) -> ExpectedColumns:
        found = [table.columns for table in self.tables]
        certain = frozenset.intersection(*(columns.certain for columns in found))
        rest = frozenset.union(*(columns.certain for columns in found)) - certain
        patterns = dict.fromkeys(name for columns in found for name in columns.possible)
        return ExpectedColumns(certain, (*patterns, *map(escape, sorted(rest))))

    @property
    def known_rows(self) -> int | None:
        counts = [rows for table in self.tables if (rows := table.known_rows) is not None]
        return sum(counts) if len(counts) == len(self.tables) else None

    def num_rows(self) -> int:
        return sum(table.num_rows() for table in self.tables)

    def tokens(self) -> dict[str, Rows]:
        found = [table.tokens() for table in self.tables]
        nothing = [np.zeros(table.num_rows(), np.int64) for table in self.tables]
        return {
            name: np.concatenate([t.get(name, n) for t, n in zip(found, nothing, strict=True)])
            for name in dict.fromkeys(name for tokens in found for name in tokens)
        }

    def read(self, rows: Rows, names: frozenset[str] | None) -> Batch | None:
        pieces, order, read, start = [], [], [], 0
        for number, table in enumerate(self.tables):
            end = start + table.num_rows()
            wanted = np.flatnonzero((rows >= start) & (rows < end))
            # An empty request still reads the first table, which tells the columns' types.
            if len(wanted) or (number == 0 and not len(rows)):
                piece = table.read(rows[wanted] - start, names)
                if piece is None:
                    return None
                pieces.append(piece)
                order.append(wanted)
                read.append(table.columns)
            start = end
        names = frozenset(name for piece in pieces for name in piece.columns)
        pairs = zip(pieces, read, strict=True)
        fill = all(known.may_lack(names.difference(piece.columns)) for piece, known in pairs)
        batch = Batch.concat(pieces, fill_missing=fill)
        return batch.take(np.argsort(np.concatenate(order)))

    def shards(self) -> list[ShardedResult]:
        return [result for table in self.tables for result in table.shards()]

    def needed(self, wanted: RequestedColumns) -> TableExpression | None:
        found = [part for table in self.tables if (part := table.needed(wanted)) is not None]
        if len(found) < len(self.tables):
            return super().needed(wanted)
        return ConcatenatedTable(tuple(found))


@dataclass(frozen=True, eq=False)
class SelectedTable(TableExpression):
    """A selection of rows of a table, in a new order."""

    table: TableExpression
    choice: IndexSelection | RepeatSelection | PartitionSelection

    @property
    def columns(self) -> ExpectedColumns:
        return self.table.columns

    @property
    def known_rows(self) -> int | None:
        return self.choice.known_rows(self.table)

    @property
    def copies(self) -> int:
        match self.choice:
            case RepeatSelection(times):
                return times * self.table.copies
            case IndexSelection(copies=copies):
                return copies
        return 1

    @_AwaitedProperty
    def _rows(self) -> Rows:
        return self.choice.rows(self.table)

    def num_rows(self) -> int:
        return len(self._rows) if (known := self.known_rows) is None else known

    def tokens(self) -> dict[str, Rows]:
        return {name: counts[self._rows] for name, counts in self.table.tokens().items()}

    def read(self, rows: Rows, names: frozenset[str] | None) -> Batch | None:
        return self.table.read(self._rows[rows], names)

    def shards(self) -> list[ShardedResult]:
        return self.table.shards()

    def needed(self, wanted: RequestedColumns) -> TableExpression | None:
        if isinstance(self.choice, PartitionSelection) and self.choice.balance == "tokens":
            # The rows must be the same, whatever is read of them.
            by = {*TOKEN_COLUMNS, *filter(None, [self.choice.group_column])}
            names, found = wanted.names.union(by), wanted.found.difference(by)
            wanted = replace(wanted, names=names, found=found)
        needed = self.table.needed(wanted)
        return SelectedTable(needed, self.choice) if needed else None


def _check_same_row_count(left: int, right: int) -> None:
    if left != right:
        raise DataError(f"Tables of {left} and of {right} rows cannot be joined row by row.")


def _merge_schemas(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Merge the schemas of a call's shards: a shard may lack columns that another has."""
    if all(schema.equals(schemas[0]) for schema in schemas[1:]):
        return schemas[0]
    try:
        return pa.unify_schemas(list(schemas), promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            f"The ranks of one call made columns of one name and different types: {error}"
        ) from error
