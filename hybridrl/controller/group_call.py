"""A group call: what the ranks are asked for, what they answer, and the driver's record of it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybridrl.batch.batch import Batch
from hybridrl.batch.call_record import CallRecord
from hybridrl.errors import DataError, WorkerError

if TYPE_CHECKING:
    from hybridrl.controller.batch_ref import BatchRef
    from hybridrl.controller.executor import Executor
    from hybridrl.controller.worker import Worker


ANY = "*"
"""The pattern that matches every name: nothing is declared."""


@dataclass(frozen=True)
class ExpectedColumns:
    """The columns that a call will return, as far as its method declares them.

    Attributes:
        certain: Names of columns that will be there.
        possible: Patterns of names that may be there besides: `reward/*`; `*` is any name.
    """

    certain: frozenset[str] = frozenset()
    possible: tuple[str, ...] = ()

    def may_have(self, name: str) -> bool:
        """Return whether a column of this name may exist."""
        return name in self.certain or any(fnmatchcase(name, known) for known in self.possible)

    def may_lack(self, names: Iterable[str]) -> bool:
        """Return whether each of these columns is declared as optional."""
        said = [known for known in self.possible if known != ANY]
        return all(any(fnmatchcase(name, known) for known in said) for name in names)

    def __or__(self, other: ExpectedColumns) -> ExpectedColumns:
        patterns = dict.fromkeys((*self.possible, *other.possible))
        return ExpectedColumns(self.certain | other.certain, tuple(patterns))

    def __str__(self) -> str:
        return ", ".join([*sorted(self.certain), *self.possible]) or "no columns"


UNKNOWN = ExpectedColumns(possible=(ANY,))
"""The columns of a call whose method does not declare what it returns."""


def any_column(name: str) -> bool:
    """Accept every column name."""
    return True


@dataclass(frozen=True)
class RequestedColumns:
    """The columns that a reader requests.

    Attributes:
        names: Columns that have to be there.
        others: Which further columns are read where they are there.
        following: Columns that are read where they are there, selected or not.
        found: Columns that have been found in another table already.
    """

    names: frozenset[str] = frozenset()
    others: Callable[[str], bool] | None = None
    following: frozenset[str] = field(default=frozenset())
    found: frozenset[str] = field(default=frozenset())

    def may_be_in(self, columns: ExpectedColumns) -> bool:
        """Return whether a table with these columns may have a requested one, so that it must be
        read."""
        if any(columns.may_have(name) for name in (self.names | self.following) - self.found):
            return True
        others = self.others
        if others is None:
            return False
        further = (*(columns.certain - self.found), *columns.possible)
        return any(name == ANY or others(name) for name in further)

    def without(self, found: Iterable[str]) -> RequestedColumns:
        """Return the request without these columns, which were found elsewhere."""
        return replace(self, found=self.found.union(found))


TOKEN_COLUMNS = ("prompt_ids", "response_ids")
"""The columns whose tokens are balanced over the ranks."""
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShardInfo:
    """A description of a shard that is available without fetching it.

    Attributes:
        rows: The numbers of its rows in their table.
        schema: Names and types of its columns.
        tokens: Tokens of each of its `TOKEN_COLUMNS` columns by row.
        total: How many rows the table has in all; None: as many as the shards beside it.
        sizes: Bytes of each column.
    """

    rows: Rows
    schema: pa.Schema
    tokens: dict[str, Rows]
    total: int | None = None
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, batch: Batch, rows: Rows, total: int | None = None) -> ShardInfo:
        """Describe `batch` as the shard that holds `rows` of its table."""
        tokens = {name: batch.lengths(name) for name in TOKEN_COLUMNS if name in batch}
        sizes = tuple(column.nbytes for column in batch.table.columns)
        return cls(rows, batch.table.schema, tokens, total, sizes)

    def bytes_of(self, rows: int, names: Sequence[str]) -> float:
        """Estimate the bytes of this many rows of these columns."""
        wanted = set(names)
        size = sum(
            s for name, s in zip(self.schema.names, self.sizes, strict=True) if name in wanted
        )
        return size * rows / max(1, len(self.rows))


def build_row_count_error(method: str, counts: Iterable[int]) -> DataError:
    """Build the error of a call that was given batches of these numbers of rows."""
    return DataError(
        f"`{method}` was given batches of {' and '.join(map(str, counts))} rows. The rows of a "
        "call's batches go together, one by one, so all need as many."
    )


def count_tokens(batch: Batch) -> int:
    """Count the tokens of the `TOKEN_COLUMNS` over all rows."""
    return sum(int(batch.lengths(name).sum()) for name in TOKEN_COLUMNS if name in batch)


class ShardedResult(ABC):
    """The result of one call: a shard from each rank that answered, in any order of rows.

    Attributes:
        columns: The columns that the call makes, as far as it is known beforehand.
        rows: Rows of the table, if it is known beforehand.
    """

    def __init__(self, columns: ExpectedColumns, rows: int | None) -> None:
        self.columns = columns
        self.rows = rows

    @abstractmethod
    def infos(self) -> Sequence[ShardInfo]:
        """Return the descriptions of the shards; waits for the call."""

    @abstractmethod
    def batch(self, index: int) -> Batch:
        """Return all rows of a shard."""

    def read(self, index: int, rows: Rows, names: Sequence[str]) -> Batch:
        """Read these columns of the rows at these positions of a shard."""
        return self.batch(index).select(names).take(rows)


@dataclass(frozen=True)
class BuildRequest:
    """A request to build a role. Each rank also gets its `WorkerContext`."""

    role: str
    worker_class: type[Worker]
    keywords: Mapping[str, Any]


@dataclass(frozen=True)
class InvokeRequest:
    """A request to call a method of a role's worker. Each rank also gets its `RankAssignment`."""

    role: str
    method: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


@dataclass(frozen=True)
class ApplyRequest:
    """A request to run a pure function on rows of a table. Each host also gets its
    `RankAssignment`.

    Attributes:
        together: So many neighbouring rows go to the same host.
        makes: The columns that it says it makes.
    """

    function: Callable[[Batch], Batch]
    table: BatchRef
    together: int = 1
    makes: ExpectedColumns = UNKNOWN


CallRequest = BuildRequest | InvokeRequest | ApplyRequest


@dataclass(frozen=True)
class RankAssignment:
    """A rank's own part in a group call: it gets part `index` of `parts` of the rows, and its
    result counts if it `answers`."""

    index: int = 0
    parts: int = 1
    answers: bool = True


@dataclass(frozen=True)
class WorkerFailure:
    """An exception in a worker: role, rank, method, message, time (seconds since the epoch) and
    traceback, which is empty if the message suffices."""

    role: str
    rank: int
    method: str
    message: str
    traceback: str
    time: float


class UpstreamError(Exception):
    """An input of this call could not be made; carries the failure that is the cause."""

    def __init__(self, failure: WorkerFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True)
class RankReply:
    """A rank's reply besides its batch; small, so that the driver can read it."""

    record: CallRecord
    value: Any = None
    info: ShardInfo | None = None
    failure: WorkerFailure | None = None


@dataclass
class GroupCall:
    """The driver's record of a group call.

    Attributes:
        number: Calls are numbered in the order in which the driver makes them.
        hosts: Where each rank runs, in rank order.
        parts: What is each rank's own.
        step: The step that the call belongs to; see `Executor`.
        reads: The numbers of the calls whose results it was given.
        since: When it was made, seconds of the monotonic clock.
        replies: Of each rank; None: not yet known.
    """

    number: int
    role: str
    method: str
    hosts: Sequence[int]
    parts: Sequence[Any]
    step: int = 0
    reads: tuple[int, ...] = ()
    since: float = field(default_factory=time.monotonic)
    replies: list[RankReply | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.replies = self.replies or [None] * len(self.hosts)

    @property
    def name(self) -> str:
        """The role and method, for messages."""
        return f"{self.role}.{self.method}"

    @property
    def is_done(self) -> bool:
        """True once every rank has replied."""
        return None not in self.replies

    def answers(self) -> list[RankReply]:
        """Return the replies of the ranks whose results count; the call must be done."""
        answering = zip(self.replies, self.parts, strict=True)
        return [reply for reply, part in answering if part.answers and reply is not None]


class CallResult(ShardedResult):
    """The batch that a call returns, a shard from each answering rank, as the driver refers to it.

    Attributes:
        call: What made it; None for a batch that the driver put there.
        data: What the executor finds the shards by.
    """

    def __init__(
        self,
        executor: Executor,
        call: GroupCall | None,
        data: Any,
        columns: ExpectedColumns = UNKNOWN,
        rows: int | None = None,
        infos: Sequence[ShardInfo] = (),
    ) -> None:
        super().__init__(columns, rows)
        self.executor = executor
        self.call = call
        self.data = data
        self._infos = infos

    def infos(self) -> Sequence[ShardInfo]:
        if self.call is not None:
            self.executor.wait([self.call])
            replies = self.call.answers()
            infos = [reply.info for reply in replies if reply.info is not None]
            if len(infos) < len(replies):
                raise WorkerError(f"{self.call.name} has failed before; there is no result of it.")
            return infos
        return self._infos

    def batch(self, index: int) -> Batch:
        return self.executor.fetch(self, index)
