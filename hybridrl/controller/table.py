"""Tables of samples whose rows lie where they were made, as expressions.

A table is what calls returned: joined, chosen from, one below the other. Nothing here holds rows;
an expression is evaluated where it is needed, by `read`, from what the shards say of themselves
(`ShardInfo`, small) and the rows that are fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hybridrl.core.balance import partition
from hybridrl.core.batch import Batch
from hybridrl.errors import DataError

EVEN_ENOUGH = 1.02
"""Consecutive rows are dealt out if no part has more than this multiple of the mean; otherwise the
rows of a part are picked one by one, which copies them."""
Rows = npt.NDArray[np.int64]
Fetch = Callable[[Any], Any]
"""Turns a reference that an executor handed out into the object behind it."""


@dataclass(frozen=True)
class ShardInfo:
    """What may be known of a shard without fetching it: its row numbers in its table, its column
    names, the tokens of each of its `*_ids` columns by row, and how many rows the table has in all
    (None: as many as the shards that stand beside it)."""

    rows: Rows
    columns: tuple[str, ...]
    tokens: dict[str, Rows]
    total: int | None = None

    @classmethod
    def of(cls, batch: Batch, rows: Rows, total: int | None = None) -> ShardInfo:
        """Describes `batch` as the shard that holds `rows` of its table."""
        tokens = {name: batch.lengths(name) for name in batch.columns if name.endswith("_ids")}
        return cls(rows, tuple(batch.columns), tokens, total)


@dataclass(frozen=True)
class Shard:
    """References to a shard's batch and to the reply that carries its `ShardInfo`."""

    data: Any
    reply: Any


class Node:
    """An expression for a table of samples."""

    def num_rows(self, fetch: Fetch) -> int:
        raise NotImplementedError

    def tokens(self, fetch: Fetch) -> dict[str, Rows]:
        """Tokens per row of every `*_ids` column."""
        raise NotImplementedError

    def read(self, rows: Rows, columns: frozenset[str] | None, fetch: Fetch) -> Batch | None:
        """The batch of these rows, or None where the node has none of the wanted columns."""
        raise NotImplementedError

    def shards(self) -> list[Shard]:
        """Every shard below."""
        raise NotImplementedError


@dataclass(frozen=True)
class Table(Node):
    """What one call returned: a shard from each answering rank, in any order of rows. Of a table
    that comes bit by bit, the shards that came first."""

    parts: tuple[Shard, ...]

    def _infos(self, fetch: Fetch) -> list[ShardInfo]:
        return [fetch(shard.reply).info for shard in self.parts]

    def num_rows(self, fetch: Fetch) -> int:
        infos = self._infos(fetch)
        total = infos[0].total
        return sum(len(info.rows) for info in infos) if total is None else total

    def present(self, fetch: Fetch) -> Rows:
        """The numbers of the rows that are in these shards, ascending."""
        return np.sort(np.concatenate([info.rows for info in self._infos(fetch)]))

    def tokens(self, fetch: Fetch) -> dict[str, Rows]:
        infos = self._infos(fetch)
        rows = np.concatenate([info.rows for info in infos])
        found = {}
        for name in infos[0].tokens:
            found[name] = np.zeros(self.num_rows(fetch), np.int64)
            found[name][rows] = np.concatenate([info.tokens[name] for info in infos])
        return found

    def read(self, rows: Rows, columns: frozenset[str] | None, fetch: Fetch) -> Batch | None:
        infos = self._infos(fetch)
        names = [name for name in infos[0].columns if columns is None or name in columns]
        if not names:
            return None
        total = self.num_rows(fetch)
        owner, place = np.full(total, -1, np.int64), np.empty(total, np.int64)
        for number, info in enumerate(infos):
            owner[info.rows] = number
            place[info.rows] = np.arange(len(info.rows))
        pieces, order = [], []
        for number, shard in enumerate(self.parts):
            wanted = np.flatnonzero(owner[rows] == number)
            # An empty request still reads the first shard, which tells the columns' types.
            if len(wanted) or (number == 0 and not len(rows)):
                pieces.append(fetch(shard.data).select(names).take(place[rows[wanted]]))
                order.append(wanted)
        batch = Batch.concat(pieces)
        return batch if len(pieces) == 1 else batch.take(np.argsort(np.concatenate(order)))

    def shards(self) -> list[Shard]:
        return list(self.parts)


@dataclass(frozen=True)
class Join(Node):
    """Two tables side by side, row by row; the right one wins where both have a column."""

    left: Node
    right: Node

    def num_rows(self, fetch: Fetch) -> int:
        return self.left.num_rows(fetch)

    def tokens(self, fetch: Fetch) -> dict[str, Rows]:
        return self.left.tokens(fetch) | self.right.tokens(fetch)

    def read(self, rows: Rows, columns: frozenset[str] | None, fetch: Fetch) -> Batch | None:
        left, right = self.left.num_rows(fetch), self.right.num_rows(fetch)
        if left != right:
            raise DataError(f"Tables of {left} and of {right} rows cannot be joined row by row.")
        sides = [side.read(rows, columns, fetch) for side in (self.left, self.right)]
        found = [side for side in sides if side is not None]
        return found[0] | found[1] if len(found) == 2 else (found[0] if found else None)

    def shards(self) -> list[Shard]:
        return self.left.shards() + self.right.shards()


def with_part(node: Node, whole: Table, part: Table) -> Node:
    """The expression with `part` in the place of the table `whole` that it is a part of: what can
    be read of it before the rest has come."""
    if node is whole:
        return part
    if isinstance(node, Join):
        return Join(with_part(node.left, whole, part), with_part(node.right, whole, part))
    return node


@dataclass(frozen=True)
class Concat(Node):
    """Tables with the same columns, one below the other."""

    tables: tuple[Node, ...]

    def num_rows(self, fetch: Fetch) -> int:
        return sum(table.num_rows(fetch) for table in self.tables)

    def tokens(self, fetch: Fetch) -> dict[str, Rows]:
        found = [table.tokens(fetch) for table in self.tables]
        return {name: np.concatenate([tokens[name] for tokens in found]) for name in found[0]}

    def read(self, rows: Rows, columns: frozenset[str] | None, fetch: Fetch) -> Batch | None:
        pieces, order, start = [], [], 0
        for number, table in enumerate(self.tables):
            end = start + table.num_rows(fetch)
            wanted = np.flatnonzero((rows >= start) & (rows < end))
            # An empty request still reads the first table, which tells the columns' types.
            if len(wanted) or (number == 0 and not len(rows)):
                piece = table.read(rows[wanted] - start, columns, fetch)
                if piece is None:
                    return None
                pieces.append(piece)
                order.append(wanted)
            start = end
        return Batch.concat(pieces).take(np.argsort(np.concatenate(order)))

    def shards(self) -> list[Shard]:
        return [shard for table in self.tables for shard in table.shards()]


@dataclass(frozen=True)
class Choose(Node):
    """Some rows of a table, in a new order, chosen by `choice`."""

    table: Node
    choice: Take | Repeat | Part

    def _rows(self, fetch: Fetch) -> Rows:
        return self.choice.rows(self.table, fetch)

    def num_rows(self, fetch: Fetch) -> int:
        return len(self._rows(fetch))

    def tokens(self, fetch: Fetch) -> dict[str, Rows]:
        rows = self._rows(fetch)
        return {name: counts[rows] for name, counts in self.table.tokens(fetch).items()}

    def read(self, rows: Rows, columns: frozenset[str] | None, fetch: Fetch) -> Batch | None:
        return self.table.read(self._rows(fetch)[rows], columns, fetch)

    def shards(self) -> list[Shard]:
        return self.table.shards()


@dataclass(frozen=True)
class Take:
    """The rows with these numbers."""

    numbers: Rows

    def rows(self, table: Node, fetch: Fetch) -> Rows:
        return self.numbers


@dataclass(frozen=True)
class Repeat:
    """Every row `times` times, copies of a row next to each other."""

    times: int

    def rows(self, table: Node, fetch: Fetch) -> Rows:
        return np.repeat(np.arange(table.num_rows(fetch)), self.times)


@dataclass(frozen=True)
class Part:
    """Part `index` of `parts`; see `part_rows`. `together` neighbouring rows are never parted."""

    index: int
    parts: int
    balance: Literal["rows", "tokens"]
    together: int = 1

    def rows(self, table: Node, fetch: Fetch) -> Rows:
        return part_rows(table, self, fetch)


def part_rows(table: Node, part: Part, fetch: Fetch) -> Rows:
    """Row numbers of a part, ascending. Every rank computes the same cut from the same lengths."""
    count, rest = divmod(table.num_rows(fetch), part.together)
    if rest:
        raise DataError(
            f"{count * part.together + rest} rows cannot be dealt out {part.together} at a time."
        )
    if part.parts == 1:
        units = np.arange(count)
    elif part.balance == "rows":
        edges = [count * i // part.parts for i in range(part.parts + 1)]
        units = np.arange(edges[part.index], edges[part.index + 1])
    else:
        tokens = sum(table.tokens(fetch).values(), start=np.zeros(count * part.together, np.int64))
        units = _balanced_part(tokens.reshape(count, part.together).sum(1), part)
    return (units[:, None] * part.together + np.arange(part.together)).reshape(-1)


def _balanced_part(tokens: Rows, part: Part) -> Rows:
    """The units of a part that has its share of the tokens, ascending."""
    count = len(tokens)
    costs = tokens + 1  # so that rows without tokens spread evenly
    ends = np.cumsum(costs)
    goals = ends[-1] * np.arange(1, part.parts) / part.parts if count else []
    edges = np.concatenate([[0], np.searchsorted(ends, goals, side="left") + 1, [count]])
    sizes = np.diff(np.concatenate([[0], ends])[np.minimum(edges, count)])
    if len(sizes) and sizes.max() <= EVEN_ENOUGH * sizes.mean():
        return np.arange(edges[part.index], edges[part.index + 1])  # read without copying
    return np.sort(np.asarray(partition(costs.tolist(), part.parts)[part.index], dtype=np.int64))
