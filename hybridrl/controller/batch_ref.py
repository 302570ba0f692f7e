"""BatchRef: the driver's handle of a table whose rows lie where they were made.

A `BatchRef` is a small expression over the shards that calls returned: joined, selected, taken,
repeated, split. Nothing is evaluated on the driver. The expression travels with the next call, and
each rank works out from the shards' row counts and lengths (`ShardInfo`, small) which rows are its
own, and fetches those. So calls return at once and a step's cost on the driver does not grow
with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hybridrl.controller.table import (
    Choose,
    Concat,
    Fetch,
    Join,
    Node,
    Part,
    Repeat,
    Rows,
    Table,
    Take,
    part_rows,
    with_part,
)
from hybridrl.core.batch import Batch
from hybridrl.errors import DataError

if TYPE_CHECKING:
    from hybridrl.controller.executor import Executor


@dataclass(frozen=True)
class BatchRef:
    """A table of samples that lies with the workers. `batch |= group.method(batch)` adds columns.

    `executor` is left behind when the reference travels to a worker.

    Attributes:
        stream: A table in `node` that comes bit by bit, and its parts, the first ones first; see
            `by_parts`.
        only: The part of it that this reference is about; None: everything.
        partial: Whether selected columns that no call has made are left out.
    """

    node: Node
    executor: Executor | None = field(default=None, repr=False, compare=False)
    columns: frozenset[str] | None = None
    stream: tuple[Table, tuple[Table, ...]] | None = field(default=None, repr=False, compare=False)
    only: Table | None = field(default=None, repr=False, compare=False)
    partial: bool = False

    def __or__(self, other: BatchRef) -> BatchRef:
        """Joins by row: handles only, nothing moves."""
        if self.columns is not None or other.columns is not None:
            raise DataError("Join before `select`: a selection is the last thing done to a batch.")
        stream = other.stream or self.stream
        return replace(self, node=Join(self.node, other.node), stream=stream)

    def select(self, *columns: str) -> BatchRef:
        """Only these columns; a worker that gets the result fetches nothing else."""
        return replace(self, columns=frozenset(columns))

    @staticmethod
    def concat(parts: Sequence[BatchRef]) -> BatchRef:
        """Tables with the same columns, one below the other: handles only, nothing moves."""
        if any(part.columns is not None for part in parts):
            raise DataError("Concatenate before `select`: it is the last thing done to a batch.")
        if len(parts) == 1:
            return parts[0]
        return replace(parts[0], node=Concat(tuple(part.node for part in parts)), stream=None)

    @staticmethod
    def of_stream(parts: Sequence[BatchRef]) -> BatchRef:
        """One table of calls that return its rows bit by bit, in this order."""
        tables = tuple(part.node for part in parts if isinstance(part.node, Table))
        whole = Table(tuple(shard for table in tables for shard in table.parts))
        return replace(parts[0], node=whole, stream=(whole, tables))

    def by_parts(self) -> list[BatchRef]:
        """The same reference to the rows of each part of its stream, if it has one, so that work on
        the first can begin before the last are there."""
        if self.stream is None:
            return [self]
        whole, parts = self.stream
        return [
            replace(self, node=with_part(self.node, whole, part), stream=None, only=part)
            for part in parts
        ]

    def take(self, rows: Sequence[int] | Rows) -> BatchRef:
        """The rows with these numbers, in this order."""
        return self._choose(Take(np.asarray(rows, dtype=np.int64)))

    def repeat(self, times: int) -> BatchRef:
        """Every row `times` times, copies next to each other: n samples of each prompt."""
        return self._choose(Repeat(times))

    def split(self, parts: int, balance: Literal["rows", "tokens"] = "rows") -> list[BatchRef]:
        """Cuts into `parts`: consecutive blocks, or sets of rows with equally many tokens."""
        return [self._choose(Part(index, parts, balance)) for index in range(parts)]

    def apply(self, function: Callable[[Batch], Batch], columns: Iterable[str]) -> BatchRef:
        """Runs a pure function on all rows of these columns, beside the data; the result has the
        same rows. The function is sent by value, so it may be a lambda or `functools.partial`."""
        return self._connected().apply(function, self.select(*columns))

    def collect(self, columns: Iterable[str] | None = None, *, partial: bool = False) -> Batch:
        """Brings rows to the driver: all columns, or these, or with `partial` those of these that
        were made. Waits until they are there."""
        wanted = self if columns is None else replace(self.select(*columns), partial=partial)
        return self._connected().collect(wanted)

    def __len__(self) -> int:
        """Number of rows; waits until it is known."""
        executor = self._connected()
        executor.wait([shard.reply for shard in self.node.shards()])
        return self.node.num_rows(executor.fetch)

    def read(self, part: Part, fetch: Fetch) -> tuple[Batch, Rows]:
        """On a worker: the rows of `part` and their numbers in this table."""
        if self.only is None:
            rows = part_rows(self.node, part, fetch)
        else:
            present = self.only.present(fetch)
            rows = present[part_rows(Choose(self.node, Take(present)), part, fetch)]
        batch = self.node.read(rows, self.columns, fetch)
        missing = (self.columns or frozenset()) - set(() if batch is None else batch.columns)
        if batch is None or (missing and not self.partial):
            raise DataError(f"No call has made the column(s) {', '.join(sorted(missing))} yet.")
        return batch, rows

    def _choose(self, choice: Take | Repeat | Part) -> BatchRef:
        return replace(self, node=Choose(self.node, choice), stream=None)

    def _connected(self) -> Executor:
        if self.executor is None:
            raise DataError("A BatchRef can be evaluated on the driver only.")
        return self.executor

    def __getstate__(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "executor": None,
            "columns": self.columns,
            "stream": None,
            "only": self.only,
            "partial": self.partial,
        }
