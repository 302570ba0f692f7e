"""Transfer protocols: how a group call spreads its batch over the ranks, and which ranks answer.

A worker marks a method that the driver may call with `@transfer(protocol)`. A protocol is *which
mesh axes split the rows* and *which ranks answer*; the named ones below are values of that type,
and a worker may define another. The rows that a rank reads are a selection of its table's, see
`row_selections`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from hybridrl.batch.batch import Batch
from hybridrl.controller.group_call import UNKNOWN, ExpectedColumns, RequestedColumns, Rows
from hybridrl.controller.row_selections import PartitionSelection
from hybridrl.errors import ConfigError
from hybridrl.layout.rank_mesh import MeshCoordinate

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


def list_transfer_methods(worker_class: type) -> list[str]:
    """Return the names of the methods that `transfer` has marked."""
    return [n for n in dir(worker_class) if hasattr(getattr(worker_class, n), "__transfer__")]


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
