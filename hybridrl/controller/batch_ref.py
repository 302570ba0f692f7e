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
    Take,
    part_rows,
)
from hybridrl.core.batch import Batch
from hybridrl.errors import DataError

if TYPE_CHECKING:
    from hybridrl.controller.executor import Executor


@dataclass(frozen=True)
class BatchRef:
    """A table of samples that lies with the workers. `batch |= group.method(batch)` adds columns.

    `executor` is left behind when the reference travels to a worker.
    """

    node: Node
    executor: Executor | None = field(default=None, repr=False, compare=False)
    columns: frozenset[str] | None = None

    def __or__(self, other: BatchRef) -> BatchRef:
        """Joins by row: handles only, nothing moves."""
        if self.columns is not None or other.columns is not None:
            raise DataError("Join before `select`: a selection is the last thing done to a batch.")
        return replace(self, node=Join(self.node, other.node))

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
        return replace(parts[0], node=Concat(tuple(part.node for part in parts)))

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

    def collect(self, columns: Iterable[str] | None = None) -> Batch:
        """Brings rows to the driver: all columns, or these. Waits until they are there."""
        wanted = self if columns is None else self.select(*columns)
        return self._connected().collect(wanted)

    def __len__(self) -> int:
        """Number of rows; waits until it is known."""
        executor = self._connected()
        executor.wait([shard.reply for shard in self.node.shards()])
        return self.node.num_rows(executor.fetch)

    def read(self, part: Part, fetch: Fetch) -> tuple[Batch, Rows]:
        """On a worker: the rows of `part` and their numbers in this table."""
        rows = part_rows(self.node, part, fetch)
        batch = self.node.read(rows, self.columns, fetch)
        missing = (self.columns or frozenset()) - set(batch.columns if batch else ())
        if batch is None or missing:
            raise DataError(f"No call has made the column(s) {', '.join(sorted(missing))} yet.")
        return batch, rows

    def _choose(self, choice: Take | Repeat | Part) -> BatchRef:
        return replace(self, node=Choose(self.node, choice))

    def _connected(self) -> Executor:
        if self.executor is None:
            raise DataError("A BatchRef can be evaluated on the driver only.")
        return self.executor

    def __getstate__(self) -> dict[str, Any]:
        return {"node": self.node, "executor": None, "columns": self.columns}
