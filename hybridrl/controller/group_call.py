"""A group call: what the ranks are asked for, what they answer, and the driver's record of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridrl.batch.batch import Batch
from hybridrl.batch.call_record import Record
from hybridrl.controller.shards import UNKNOWN, Columns, ShardInfo, Shards
from hybridrl.errors import WorkerError

if TYPE_CHECKING:
    from hybridrl.controller.batch_ref import BatchRef
    from hybridrl.controller.executor import Executor
    from hybridrl.controller.worker import Worker


@dataclass(frozen=True)
class Build:
    """A request to build a role. Each rank also gets its `Context`."""

    role: str
    worker_class: type[Worker]
    keywords: Mapping[str, Any]


@dataclass(frozen=True)
class Invoke:
    """A request to call a method of a role's worker. Each rank also gets its `RankPart`."""

    role: str
    method: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


@dataclass(frozen=True)
class Apply:
    """A request to run a pure function on rows of a table. Each host also gets its `RankPart`.

    Attributes:
        together: So many neighbouring rows go to the same host.
        makes: The columns that it says it makes.
    """

    function: Callable[[Batch], Batch]
    table: BatchRef
    together: int = 1
    makes: Columns = UNKNOWN


Request = Build | Invoke | Apply


class RankPart(NamedTuple):
    """What is a rank's own in a group call: it gets part `index` of `parts` of the rows, and its
    result counts if it `answers`."""

    index: int = 0
    parts: int = 1
    answers: bool = True


@dataclass(frozen=True)
class Failure:
    """An exception in a worker: where it happened, when (seconds since the epoch), and its
    traceback; empty if the message says enough."""

    role: str
    rank: int
    method: str
    message: str
    traceback: str
    time: float


class UpstreamError(Exception):
    """An input of this call could not be made; carries the failure that is the cause."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True)
class Reply:
    """What a rank answers besides a batch: small, so that the driver may read it."""

    record: Record
    value: Any = None
    info: ShardInfo | None = None
    failure: Failure | None = None


@dataclass
class Call:
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
    replies: list[Reply | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.replies = self.replies or [None] * len(self.hosts)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.role}.{self.method}"

    @property
    def is_done(self) -> bool:
        """Whether every rank has replied."""
        return None not in self.replies

    @property
    def answering(self) -> list[int]:
        """The ranks whose results count."""
        return [rank for rank, part in enumerate(self.parts) if part.answers]


class Result(Shards):
    """The batch that a call returns, a shard from each answering rank, as the driver holds it.

    Attributes:
        call: What made it; None for a batch that the driver put there.
        data: What the executor finds the shards by.
    """

    def __init__(
        self,
        executor: Executor,
        call: Call | None,
        data: Any,
        columns: Columns = UNKNOWN,
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
            replies = [self.call.replies[rank] for rank in self.call.answering]
            if any(reply.failure for reply in replies):
                raise WorkerError(f"{self.call.name} has failed before; there is no result of it.")
            return [reply.info for reply in replies]
        return self._infos

    def batch(self, index: int) -> Batch:
        return self.executor.fetch(self, index)
