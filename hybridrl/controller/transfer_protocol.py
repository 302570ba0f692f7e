"""Transfer protocols: how a group call spreads its batch over the ranks, and which ranks answer.

A worker marks a method that the driver may call with `@transfer(protocol)`. A protocol is *which
mesh axes split the rows* and *which ranks answer*; the named ones below are values of that type,
and a worker may define another. The rows that a rank reads are a selection of its table's.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import Batch
from hybridrl.batch.row_balancing import balance_rows, compute_row_costs
from hybridrl.controller.group_call import UNKNOWN, ExpectedColumns, RequestedColumns, Rows
from hybridrl.errors import ConfigError, DataError
from hybridrl.layout.rank_mesh import MeshCoordinate

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


_Method = TypeVar("_Method", bound=Callable[..., object])


@dataclass(frozen=True)
class TransferProtocol:
    """A rule of how a call's rows are split over ranks and which ranks' results are returned.

    Attributes:
        split: Mesh axes over which the rows of a batch argument are split, outermost first. Ranks
            that agree on these axes get the same rows. Empty: every rank gets every row.
        speakers: For axes that do not split, the index that answers (-1: the last). Axes not named
            answer at index 0.
        answers: `all`: the call returns one result per speaking rank. `one`: every rank computes
            the same, so the call returns the first speaker's result.
        balance: How rows are cut into parts: `rows` cuts consecutive blocks of equal count;
            `tokens` balances what their tokens cost the worker (`Worker.attention_length`).
        rows_together: So many neighbouring rows go to the same rank.
        group_column: Neighbouring rows that are equal in this column go to the same rank.
    """

    split: tuple[str, ...] = ()
    speakers: Mapping[str, int] = field(default_factory=dict)
    answers: Literal["all", "one"] = "all"
    balance: Literal["rows", "tokens"] = "rows"
    rows_together: int = 1
    group_column: str | None = None

    def part(self, coordinates: Mapping[str, MeshCoordinate]) -> tuple[int, int]:
        """Return the part that the rank at `coordinates` gets, and the number of parts."""
        index, parts = 0, 1
        for axis in self.split:
            place = coordinates.get(axis, MeshCoordinate(0, 1))
            index, parts = index * place.size + place.index, parts * place.size
        return index, parts

    def speaks(self, rank: int, coordinates: Sequence[Mapping[str, MeshCoordinate]]) -> bool:
        """Return whether `rank` answers for its part: among the ranks of that part, the one at the
        answering index of every other axis of the meshes that it is on. `coordinates` has one entry
        per rank."""
        if not self.split:
            return True
        mine = [
            r
            for r, place in enumerate(coordinates)
            if self.part(place) == self.part(coordinates[rank])
        ]
        wanted = [r for r in mine if self._at_speaking_index(coordinates[r])]
        return rank == (wanted or mine)[0]

    def _at_speaking_index(self, coordinates: Mapping[str, MeshCoordinate]) -> bool:
        return all(
            place.index == self.speakers.get(axis, 0) % place.size
            for axis, place in coordinates.items()
            if axis in self.speakers
        )


ONE_TO_ALL = TransferProtocol()
"""Every rank gets the same arguments, every rank answers."""
FIRST_RANK = TransferProtocol(answers="one")
"""Every rank gets the same arguments, the first rank answers."""
DP = TransferProtocol(split=("dp",), balance="tokens")
"""Rows split over data-parallel ranks; one rank of each model-parallel group answers."""
THREE_D = TransferProtocol(split=("dp",), speakers={"pp": -1}, balance="tokens")
"""Like `DP`, but the last pipeline stage answers, because it holds the outputs."""
THREE_D_PP_ONLY = TransferProtocol(split=("pp",))
"""Rows split over pipeline stages."""
THREE_D_ALL_MICRO_DP = TransferProtocol(split=("rollout_dp",))
"""Rows split over all generation replicas of the hybrid engine."""
UPDATE = TransferProtocol(split=("dp",), speakers={"pp": -1}, answers="one", balance="tokens")
"""Like `THREE_D`, for an optimizer step, whose metrics are already global: one rank answers."""

UPDATE_PAIRS = replace(UPDATE, rows_together=2)
"""Like `UPDATE`, for a loss that compares neighbouring rows: chosen and rejected."""

TASKS = replace(THREE_D, rows_together=2, group_column="task_block")
"""Like `THREE_D`, for pairs of many tasks: all pairs of a block go to the same rank."""
UPDATE_TASKS = replace(UPDATE, rows_together=2, group_column="task_block")
"""Like `UPDATE`, for a loss that compares the pairs of a task."""


class PartialTable(NamedTuple):
    """A batch, the indices of its rows and the row count of its table, returned by a method that
    chose itself which rows of the table to make."""

    batch: Batch
    rows: Rows
    total: int


ColumnNames = Sequence[str] | Callable[[Mapping[str, Any]], Sequence[str]]
"""The names of columns, or a function that returns them for the keywords that the workers were
built with."""


@dataclass(frozen=True)
class TransferSpec:
    """The options of `@transfer`, stored on the method; see there."""

    protocol: TransferProtocol
    returns_batch: bool
    streams: bool = False
    reads: ColumnNames | None = None
    may_read: Callable[[str], bool] | Sequence[str] = ()
    makes: ColumnNames | None = None
    may_make: ColumnNames = ()
    rows: Callable[[Any], Rows] | None = None
    copies_together: Callable[[Mapping[str, Any]], bool] | None = None
    follows: ColumnNames = ()

    def bind(self, keywords: Mapping[str, Any]) -> MethodTransfer:
        """Return the options for workers that were built with these keywords."""

        def resolve(names: ColumnNames) -> Sequence[str]:
            return names(keywords) if callable(names) else names

        together = self.copies_together is not None and self.copies_together(keywords)
        wanted, columns = None, UNKNOWN
        if self.reads is not None:
            may = self.may_read
            others = may if callable(may) else frozenset(may).__contains__ if may else None
            wanted = RequestedColumns(
                frozenset(resolve(self.reads)), others, following=frozenset(resolve(self.follows))
            )
        if self.makes is not None:
            columns = ExpectedColumns(frozenset(resolve(self.makes)), tuple(resolve(self.may_make)))
        return MethodTransfer(
            *(self.protocol, self.returns_batch, self.streams and not together, together),
            *(wanted, columns, self.rows),
        )


@dataclass(frozen=True)
class MethodTransfer:
    """The options of a method of the workers of one group, which are known once these are built.

    Attributes:
        streams: Whether the method is called for each part of a table that comes bit by bit.
        copies_together: Whether copies of a row, made by `BatchRef.repeat`, go to the same rank.
        wanted: The columns that the method reads; None: it does not declare them.
        columns: The columns that it returns.
    """

    protocol: TransferProtocol
    returns_batch: bool
    streams: bool
    copies_together: bool
    wanted: RequestedColumns | None
    columns: ExpectedColumns
    rows: Callable[[Any], Rows] | None

    def part(
        self,
        index: int,
        parts: int,
        copies: int,
        attention_length: float = math.inf,
        shares_prompts: bool = False,
    ) -> PartitionSelection:
        """Return the selection of part `index` of `parts` of a batch.

        Args:
            copies: So many neighbouring rows of the batch are copies of one.
            attention_length, shares_prompts: Of the worker.
        """
        together = copies if self.copies_together else self.protocol.rows_together
        sharing = max(copies, together) if shares_prompts else 1
        how = self.protocol.balance, together, attention_length, sharing
        return PartitionSelection(index, parts, *how, self.protocol.group_column)


def transfer(
    protocol: TransferProtocol,
    *,
    reads: ColumnNames | None = None,
    may_read: Callable[[str], bool] | Sequence[str] = (),
    makes: ColumnNames | None = None,
    may_make: ColumnNames = (),
    streams: bool = False,
    rows: Callable[[Any], Rows] | None = None,
    copies_together: Callable[[Mapping[str, Any]], bool] | None = None,
    follows: ColumnNames = (),
) -> Callable[[_Method], _Method]:
    """Mark a worker method as callable from the driver.

    Args:
        reads: Columns that it needs of a batch. One that no call has made is refused when the
            method is called, and the call waits for no others. None: it reads all there are.
        may_read: Further columns that it reads where they are there: names, or which of them.
        makes: Columns that it returns. None: any; then whoever reads any column waits for it.
        may_make: Further columns that it may return; `reward/*` stands for all that begin so.
        streams: Of a table that comes bit by bit the method is called for each part, as soon as
            that is there. For methods that look at each row by itself.
        rows: Given the worker, the numbers of the rows that its rank reads, whatever others read;
            None: the protocol says which.
        copies_together: Given the keywords that the workers were built with, whether the copies of
            a row that `BatchRef.repeat` made go to the same rank; None: they need not.
        follows: Columns that it reads where they are there, whatever columns the driver selected.

    The method must say what it returns: `-> Batch` gives the driver a `BatchRef` with as many rows
    as went in; anything else gives a `Handle`.

    Raises:
        ConfigError: if the return annotation is missing, or says that a batch may be returned.
    """

    def mark(method: _Method) -> _Method:
        for option, names in (("reads", reads), ("makes", makes), ("may_make", may_make)):
            if isinstance(names, str):
                raise ConfigError(
                    f"The worker method `{method.__qualname__}` is marked with "
                    f"@transfer({option}={names!r}); write ({names!r},), a list of names."
                )
        returns_batch = _returns_batch(method)
        method.__transfer__ = TransferSpec(  # type: ignore[attr-defined]
            *(protocol, returns_batch, streams, reads, may_read, makes, may_make, rows),
            *(copies_together, follows),
        )
        return method

    return mark


def _returns_batch(method: Callable[..., object]) -> bool:
    annotation = inspect.signature(method).return_annotation
    begin = f"The worker method `{method.__qualname__}` is marked with @transfer but"
    if annotation is inspect.Signature.empty:
        raise ConfigError(
            f"{begin} does not say what it returns; add `-> Batch` or another return annotation."
        )
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, getattr(method, "__globals__", {}))
        except (NameError, AttributeError):  # imported for type checkers only, or not yet defined
            words = annotation.replace("'", "").replace('"', "").split("|")
            names = [word.strip().rpartition(".")[2] for word in words]
            maybe = Batch | None if "Batch" in names else None
            annotation = Batch if names == ["Batch"] else maybe
    if annotation is Batch:
        return True
    if Batch in get_args(annotation):
        raise ConfigError(
            f"{begin} is annotated `-> {annotation}`. A method returns a batch always or never: "
            "annotate it `-> Batch`, and return one without rows where there is nothing."
        )
    return False
