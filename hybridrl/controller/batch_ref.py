"""BatchRef: the driver's handle of a table whose rows lie where they were made.

A `BatchRef` is a small expression over the results of calls: joined, selected, taken, repeated,
split. Nothing is evaluated on the driver. The expression travels with the next call, and each rank
works out from the shards' row numbers and lengths (`ShardInfo`, small) which rows are its own, and
fetches those. So calls return at once and a step's cost on the driver does not grow with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from hybridrl.batch.batch import Batch, resolve_row_numbers
from hybridrl.controller.group_call import ExpectedColumns, RequestedColumns, Rows
from hybridrl.controller.row_selections import IndexSelection, PartitionSelection, RepeatSelection
from hybridrl.controller.table_expression import ResultTable, SelectedTable, TableExpression
from hybridrl.controller.table_operations import choose, concatenate_tables, join
from hybridrl.errors import DataError, suggest_name

if TYPE_CHECKING:
    from hybridrl.controller.executor import Executor
    from hybridrl.controller.worker_group import WorkerGroup


@dataclass(frozen=True, eq=False)
class BatchRef:
    """A reference to a table of samples that stays with the workers. `batch |= group.method(batch)`
    adds columns.

    Attributes:
        executor: Where; None on a worker, to which the reference has travelled.
        selected: The columns that are meant; None: all.
        following: Columns that whoever reads gets besides those selected, where they are there.
        only: The part of a table that comes bit by bit which this reference is about; None: all.
        partial: Whether selected columns that no call has made are left out.
    """

    node: TableExpression
    executor: Executor | None = field(default=None, repr=False)
    selected: frozenset[str] | None = None
    following: frozenset[str] = frozenset()
    only: ResultTable | None = field(default=None, repr=False)
    partial: bool = False

    @property
    def columns(self) -> ExpectedColumns:
        """The columns that the table has or will have, as far as they are known before its calls
        have run."""
        known = self.node.columns
        if self.selected is None:
            return known
        possible = [escape(n) for n in self.selected - known.certain if known.may_have(n)]
        return ExpectedColumns(known.certain & self.selected, tuple(sorted(possible)))

    @property
    def calls(self) -> frozenset[int]:
        """The numbers of the calls that made its columns."""
        made = (getattr(shard, "call", None) for shard in self.node.shards())
        return frozenset(call.number for call in made if call is not None)

    def __or__(self, other: BatchRef) -> BatchRef:
        """Join two tables row by row. Only references are combined; no data moves.

        Raises:
            DataError: if the numbers of rows are known and differ.
        """
        if not isinstance(other, BatchRef):
            raise DataError(
                f"A BatchRef can be joined with another only, this is a {type(other).__name__}. "
                "A worker's method gives a batch if it is annotated `-> Batch`; a Batch of the "
                "driver's goes through `put` first."
            )
        if self.selected is not None or other.selected is not None:
            raise DataError("Join before `select`: a selection is the last thing done to a batch.")
        return replace(self, node=join(self.node, other.node))

    def __ror__(self, other: Any) -> BatchRef:
        raise DataError(
            f"A {type(other).__name__} cannot be joined with a BatchRef: a Batch of the driver's "
            "goes through `put` first."
        )

    def select(self, *columns: str) -> BatchRef:
        """Return a reference to these columns only; a worker that receives it fetches nothing else
        and waits for nothing else."""
        if wrong := [column for column in columns if not isinstance(column, str)]:
            raise DataError(f"`select` takes names of columns, one by one, not {wrong[0]!r}.")
        if not columns:
            raise DataError("`select` was given no columns. Name one or more.")
        return replace(self, selected=frozenset(columns))

    @staticmethod
    def concat(parts: Iterable[BatchRef]) -> BatchRef:
        """Concatenate tables with the same columns. Only references are combined; no data moves.

        Raises:
            DataError: if there is none, or their columns are known and differ.
        """
        parts = list(parts)
        if not parts:
            raise DataError("There is nothing to concatenate: give one batch or more.")
        if wrong := [part for part in parts if not isinstance(part, BatchRef)]:
            raise DataError(
                f"`concat` takes BatchRefs, this is a {type(wrong[0]).__name__}. A "
                "Batch of the driver's goes through `put` first."
            )
        if any(part.selected is not None for part in parts):
            raise DataError("Concatenate before `select`: it is the last thing done to a batch.")
        if len(parts) == 1:
            return parts[0]
        for part in parts[1:]:
            for one, other in ((parts[0], part), (part, parts[0])):
                lacking = [c for c in one.columns.certain if not other.columns.may_have(c)]
                if lacking:
                    raise DataError(
                        "Only batches with the same columns can stand one below the other; one of "
                        f"these has no {', '.join(sorted(lacking))}: it has {other.columns}."
                    )
        return replace(parts[0], node=concatenate_tables([part.node for part in parts]))

    @staticmethod
    def of_stream(parts: Sequence[BatchRef]) -> BatchRef:
        """Build one table from calls that return its rows part by part, in this order."""
        tables = [part.node for part in parts]
        results = tuple(result for table in tables for result in table.shards())
        return replace(parts[0], node=ResultTable(results, streamed=True))

    def by_parts(self) -> list[BatchRef]:
        """Return one reference for each part of the last streamed table, so that work on the first
        part can begin before the others exist; just this reference if no table is streamed."""
        joined = self.node.joined()
        streams = [t for t in joined if isinstance(t, ResultTable) and t.streamed]
        if not streams:
            return [self]
        whole = streams[-1]
        return [
            replace(self, node=self.node.with_part(whole, bit), only=bit) for bit in whole.bits()
        ]

    def take(self, rows: Sequence[int] | Rows, copies: int = 1) -> BatchRef:
        """Return the rows with these indices, in this order; or, for booleans, those that are true.

        Args:
            copies: So many neighbouring rows of the result are samples of one prompt, as `repeat`
                makes them.

        Raises:
            DataError: if these are no row numbers, or no such rows are there.
        """
        known = self.node.known_rows
        numbers = resolve_row_numbers(rows, known)
        is_mask = known is None and len(rows) > 0 and np.asarray(rows).dtype == np.bool_
        return self._choose(IndexSelection(numbers, len(rows) if is_mask else None, copies))

    def repeat(self, times: int) -> BatchRef:
        """Repeat every row `times` times, copies next to each other: n samples of each prompt."""
        _check_whole_number("repeat", times, 0)
        return self._choose(RepeatSelection(times))

    def split(self, parts: int, balance: Literal["rows", "tokens"] = "rows") -> list[BatchRef]:
        """Split the rows into `parts`: consecutive blocks, or sets of rows with equally many
        tokens."""
        _check_whole_number("split", parts, 1)
        if balance not in ("rows", "tokens"):
            raise DataError(f"`split` balances `rows` or `tokens`, not {balance!r}.")
        return [self._choose(PartitionSelection(index, parts, balance)) for index in range(parts)]

    def apply(
        self,
        function: Callable[[Batch], Batch],
        columns: Iterable[str],
        *,
        makes: Iterable[str] | None = None,
        on: WorkerGroup | None = None,
        together: int | None = None,
    ) -> BatchRef:
        """Run a pure function on these columns, where the data is; the result has the same rows.

        Args:
            function: It is sent by value, so it may be a lambda or `functools.partial`.
            makes: The columns that it returns; None: that shows when it has run, and whoever reads
                any column waits for it.
            on: A group on whose hosts it runs; None: on the first host.
            together: The function may see so many neighbouring rows apart from the others, such as
                the samples of a prompt. Then the hosts of `on` share the rows; None: it sees all.
        """
        columns = _parse_column_names("apply(columns=)", columns)
        makes = makes if makes is None else _parse_column_names("apply(makes=)", makes)
        if together is not None:
            _check_whole_number("apply(together=)", together, 1)
            if (self.node.known_rows or 0) % together:
                raise DataError(
                    f"{self.node.known_rows} rows cannot be dealt out {together} at a time: "
                    f"apply(together={together}) of {get_callable_name(function)}."
                )
        if on is not None and not hasattr(on, "devices"):
            raise DataError(f"`apply` runs on the hosts of a group, and on={on!r} is none.")
        table = self.select(*columns).for_reading(
            RequestedColumns(frozenset(columns)), f"`apply` of {get_callable_name(function)}"
        )
        known = None if makes is None else ExpectedColumns(frozenset(makes))
        return self._connected().apply(function, table, known, on, together)

    def collect(self, columns: Iterable[str] | None = None, *, partial: bool = False) -> Batch:
        """Bring rows to the driver: all columns, or these, or with `partial` those of these that
        exist. Waits until they are there."""
        self._connected()
        columns = columns if columns is None else _parse_column_names("collect", columns)
        ref = self if columns is None else replace(self.select(*columns), partial=partial)
        if not partial:
            ref = ref.for_reading(None, "`collect`")
        elif ref.selected is not None:
            ref = replace(ref, node=ref.node.needed(RequestedColumns(ref.selected)) or ref.node)
        return ref.read(PartitionSelection(0, 1))[0]

    def __len__(self) -> int:
        """Return the number of rows; waits if it is not known before the calls have run."""
        self._connected()
        return self.node.num_rows()

    def for_reading(self, wanted: RequestedColumns | None, reader: str) -> BatchRef:
        """Return the reference without tables that hold none of the requested columns, so that
        nobody waits for them.

        Raises:
            DataError: if a wanted column is certain not to be there; `reader` says who wants it.
        """
        if wanted is None:
            if self.selected is None:
                return self
            wanted = RequestedColumns(self.selected)
        known = self.columns
        for name in sorted(wanted.names):
            if not known.may_have(name):
                made = self.node.columns
                if made.may_have(name):
                    why, there = "which was not selected", f"those selected are {known}."
                else:
                    why, there = "which no call has made yet", f"the batch has {made}."
                raise DataError(
                    f"{reader} reads the column `{name}`, {why}; {there}"
                    f"{suggest_name(name, made.certain)}"
                )
        if self.selected is not None:
            further = filter(wanted.others or (lambda name: False), self.selected)
            wanted = RequestedColumns(wanted.names.union(further), following=wanted.following)
        node = self.node.needed(wanted) or self.node
        return replace(self, node=node, following=wanted.following)

    def rows_of(self, part: PartitionSelection) -> Rows:
        """Return the indices in this table of the rows of `part`. Only on a worker."""
        if self.only is None:
            return part.rows(self.node)
        present = self.only.present()
        return present[part.rows(SelectedTable(self.node, IndexSelection(present)))]

    def read(self, part: PartitionSelection, rows: Rows | None = None) -> tuple[Batch, Rows]:
        """Read the rows of `part`, or these rows, and return them with their indices in this table.
        Only on a worker."""
        rows = self.rows_of(part) if rows is None else rows
        names = None if self.selected is None else self.selected | self.following
        batch = self.node.read(rows, names)
        if batch is None and self.partial:
            return Batch(pa.table({})), rows
        missing = (self.selected or frozenset()) - set(() if batch is None else batch.columns)
        if batch is None and not missing:
            raise DataError("The batch has no columns.")
        if batch is None or (missing and not self.partial):
            raise DataError(
                f"No call has made the column(s) {', '.join(sorted(missing))} yet; the batch has "
                f"{self.node.columns}."
            )
        return batch, rows

    def _choose(self, choice: IndexSelection | RepeatSelection | PartitionSelection) -> BatchRef:
        return replace(self, node=choose(self.node, choice))

    def _connected(self) -> Executor:
        if self.executor is None:
            raise DataError("A BatchRef can be evaluated on the driver only.")
        return self.executor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "executor": None}


def _parse_column_names(argument: str, names: Any) -> list[str]:
    """Return column names as a list; a single name may be given as a string."""
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise DataError(f"`{argument}` takes names of columns, not {names!r}.")
    if not (found := list(names)):
        raise DataError(f"`{argument}` was given no columns. Name one or more.")
    return found


def _check_whole_number(name: str, value: int, least: int) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise DataError(f"`{name}` takes a whole number, {least} or more, not {value!r}.")


def get_callable_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the function that a `functools.partial` calls."""
    inner = getattr(function, "func", function)
    return getattr(inner, "__name__", type(inner).__name__)
