"""Host: the process of one device, in which every role placed on that device lives as an object.

Work is done in order on one thread; `status` and `stacks` are asked on another, so that a host
that hangs can still say where. A failure is returned, not raised: the driver reports it once, and
a call that needed the failed result passes it on unchanged.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybridrl.controller.batch_ref import BatchRef
from hybridrl.controller.protocol import Claimed, Transfer
from hybridrl.controller.table import Fetch, Part, ShardInfo
from hybridrl.controller.worker import Context, Rendezvous, Worker
from hybridrl.core.batch import Batch
from hybridrl.core.record import Record
from hybridrl.errors import DataError


@dataclass(frozen=True)
class Failure:
    """An exception in a worker: where it happened, when, and its traceback."""

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
    """What a host answers besides a batch: small, so that the driver may read it."""

    record: Record
    value: Any = None
    info: ShardInfo | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Call:
    """A group call, as every rank gets it."""

    role: str
    method: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


Place = tuple[tuple[int, int], bool]
"""What is a rank's own in a group call: which part of how many it gets, and whether it speaks."""


@dataclass(frozen=True)
class Status:
    """What a host is doing: the call in hand, since when (seconds), and whether it still waits for
    its inputs. `method` is empty when the host is idle."""

    role: str = ""
    rank: int = 0
    method: str = ""
    seconds: float = 0.0
    waiting: bool = False


class Host:
    """Holds the workers of one device and runs their calls.

    Args:
        fetch: Turns references into objects.
        raises: Let exceptions of workers fly instead of returning them, for the `inline` executor.
        redirects: Send what a worker prints to `logs/<role>-<rank>.log`.
    """

    def __init__(self, fetch: Fetch, *, raises: bool = False, redirects: bool = True) -> None:
        self._fetch_reference = fetch
        self._raises = raises
        self._redirects = redirects
        self._workers: dict[str, Worker] = {}
        self._output: dict[str, int] = {}
        self._output_of = ""
        self._listeners: dict[str, socket.socket] = {}
        self._current: tuple[Record, float] | None = None
        self._waiting = False

    def listen(self, role: str, address: str) -> Rendezvous:
        """Opens the socket at which the ranks of a role will meet, on `address` only."""
        self._listeners[role] = listener = socket.create_server((address, 0))
        return Rendezvous(address, listener.getsockname()[1])

    def create(
        self, context: Context, worker_class: type[Worker], keywords: Mapping[str, Any]
    ) -> Reply:
        """Builds a role on this device. The reply's value is its mesh coordinates."""

        def build(record: Record) -> tuple[Batch | None, Any, ShardInfo | None]:
            here = context
            if context.rendezvous is not None and context.rank == 0:
                listener = self._listeners.pop(context.role)
                here = replace(context, rendezvous=replace(context.rendezvous, listener=listener))
            worker = worker_class(here, **keywords)
            self._workers[context.role] = worker
            worker.leave()
            record.metrics.update(worker.record.metrics)
            return None, dict(worker.coordinates()), None

        self._open_output(context)
        return self._run(Record(context.role, context.rank, "__init__"), build)[1]

    def execute(self, call: Call, place: Place) -> tuple[Batch | None, Reply]:
        """Runs one call on this rank; gives the batch it returned, if it speaks, and the reply."""
        (index, parts), speaks = place
        worker = self._workers[call.role]
        method = getattr(worker, call.method)
        transfer: Transfer = method.__transfer__

        def run(record: Record) -> tuple[Batch | None, Any, ShardInfo | None]:
            rows, total = None, None

            def resolve(argument: Any) -> Any:
                nonlocal rows
                if not isinstance(argument, BatchRef):
                    return argument
                protocol = transfer.protocol
                part = Part(index, parts, protocol.balance, protocol.rows_together)
                batch, rows = argument.read(part, self._fetch)
                return batch

            self._waiting = True
            arguments = [resolve(argument) for argument in call.arguments]
            keywords = {name: resolve(argument) for name, argument in call.keywords.items()}
            self._waiting = False
            worker.record, worker.rows = record, rows
            worker.enter()
            value = method(*arguments, **keywords)
            worker.leave()
            if not transfer.returns_batch:
                return None, value if speaks else None, None
            if isinstance(value, Claimed):
                value, rows, total = value
            if rows is None or len(value) != len(rows):
                raise DataError(
                    f"`{call.role}.{call.method}` returned {len(value)} rows for "
                    f"{0 if rows is None else len(rows)}: a worker method that returns a batch "
                    "returns one row for each that it was given."
                )
            info = ShardInfo.of(value, rows, total)
            return (value, None, info) if speaks else (None, None, None)

        return self._run(Record(call.role, worker.context.rank, call.method), run)

    def apply(
        self, function: Callable[[Batch], Batch], table: BatchRef
    ) -> tuple[Batch | None, Reply]:
        """Runs a pure function on all rows of a table."""

        def run(record: Record) -> tuple[Batch | None, Any, ShardInfo | None]:
            self._waiting = True
            batch, rows = table.read(Part(0, 1, "rows"), self._fetch)
            self._waiting = False
            result = function(batch)
            if len(result) != len(rows):
                raise DataError(f"The applied function made {len(result)} rows of {len(rows)}.")
            return result, None, ShardInfo.of(result, rows)

        inner = getattr(function, "func", function)  # of a functools.partial
        name = getattr(inner, "__name__", type(inner).__name__)
        return self._run(Record("driver", 0, name), run)

    def status(self) -> Status:
        """What this host is doing now. Safe from any thread."""
        if (current := self._current) is None:
            return Status()
        record, begin = current
        seconds = time.monotonic() - begin
        return Status(record.role, record.rank, record.method, seconds, self._waiting)

    def stacks(self) -> str:
        """The Python stacks of all threads of this process."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
            if ident != threading.get_ident()
        )

    def close(self) -> None:
        """Closes every worker, the last one first."""
        for worker in reversed(self._workers.values()):
            worker.enter()
            worker.close()
        self._workers.clear()

    def _fetch(self, reference: Any) -> Any:
        found = self._fetch_reference(reference)
        if isinstance(found, Reply) and found.failure is not None:
            raise UpstreamError(found.failure)
        return found

    def _run(
        self,
        record: Record,
        function: Callable[[Record], tuple[Batch | None, Any, ShardInfo | None]],
    ) -> tuple[Batch | None, Reply]:
        self._direct_output(record.role)
        self._current, self._waiting = (record, time.monotonic()), False
        record.start = time.time()
        try:
            batch, value, info = function(record)
        except UpstreamError as error:
            return None, Reply(record, failure=error.failure)
        except BaseException as error:
            if self._raises:
                raise
            text = _traceback_of(error)
            logging.getLogger(__name__).error("%s.%s failed:\n%s", record.role, record.method, text)
            message = f"{type(error).__name__}: {error}"
            failure = Failure(record.role, record.rank, record.method, message, text, time.time())
            return None, Reply(record, failure=failure)
        finally:
            record.end = time.time()
            self._current = None
        record.phases = dict(record.phases)
        return batch, Reply(record, value, info)

    def _open_output(self, context: Context) -> None:
        if context.run_directory is None or not self._redirects:
            return
        path = context.run_directory / "logs" / f"{context.role}-{context.rank}.log"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._output[context.role] = os.open(path, flags, 0o644)

    def _direct_output(self, role: str) -> None:
        """Points this process's stdout and stderr, C libraries included, at the role's log."""
        descriptor = self._output.get(role)
        if descriptor is None or role == self._output_of:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        self._output_of = role


def _traceback_of(error: BaseException) -> str:
    """The traceback from the worker's own code on; the frames of this file tell nobody anything."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(error.with_traceback(trace)))
