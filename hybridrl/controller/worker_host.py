"""Host: the process of one device, in which every role placed on that device lives as an object.

Work is done in order on one thread; `status` and `snapshot` are asked on another, so that a host
that hangs can still say where. A failure is returned, not raised: the driver reports it once, and
a call that needed the failed result passes it on unchanged.
"""

from __future__ import annotations

import copy
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from hybridrl.batch.batch import Batch
from hybridrl.batch.call_record import DRIVER_ROLE, CallRecord
from hybridrl.controller.batch_ref import BatchRef, get_callable_name
from hybridrl.controller.fault_injection import FaultInjector
from hybridrl.controller.group_call import (
    ApplyRequest,
    BuildRequest,
    CallRequest,
    ExpectedColumns,
    InvokeRequest,
    RankAssignment,
    RankReply,
    Rows,
    ShardInfo,
    UpstreamError,
    WorkerFailure,
    build_row_count_error,
    count_tokens,
)
from hybridrl.controller.host_health import HostSnapshot, HostStatus, capture_snapshot
from hybridrl.controller.row_selections import PartitionSelection
from hybridrl.controller.transfer_protocol import MethodTransfer, PartialTable
from hybridrl.controller.worker import Rendezvous, Worker, WorkerContext
from hybridrl.errors import DataError, HybridRLError
from hybridrl.system.collective_waits import count_gpu_operations, read_wait_seconds
from hybridrl.system.core_pins import PINS
from hybridrl.system.redaction import redact

_CallOutput = tuple[Batch | None, Any, ShardInfo | None]
"""A batch, a value for the reply, and the batch's shard information."""


class WorkerHost:
    """A host process that holds the workers of one device and runs their calls.

    Args:
        raises: Let exceptions of workers fly instead of returning them, for the `inline` executor.
        redirects: Send what a worker prints to `logs/<role>-<rank>.log`.
    """

    def __init__(self, *, raises: bool = False, redirects: bool = True) -> None:
        self._raises = raises
        self._redirects = redirects
        self._faults = FaultInjector()
        self._workers: dict[str, Worker] = {}
        self._keywords: dict[str, Mapping[str, Any]] = {}
        self._transfers: dict[str, dict[str, MethodTransfer]] = {}
        self._stages: dict[str, int] = {}
        self._in_memory: Worker | None = None
        self._output: dict[str, int] = {}
        self._output_of = ""
        self._is_lane = False
        self._listeners: dict[str, socket.socket] = {}
        self._current: tuple[CallRecord, float] | None = None
        self._waiting = False
        self._thread: int | None = None

    def make_lane(self) -> WorkerHost:
        """Return a host of the same workers that runs calls on another thread (see
        `Worker.runs_beside`). What is printed there goes where this host's output goes."""
        lane = copy.copy(self)
        lane._output, lane._is_lane = {}, True
        return lane

    def listen(self, role: str, address: str) -> Rendezvous:
        """Open the socket at which the ranks of a role will meet, bound to `address` only."""
        self._listeners[role] = listener = socket.create_server((address, 0))
        return Rendezvous(address, listener.getsockname()[1])

    def make_record(self, role: str, part: Any, method: str) -> CallRecord:
        """Return a record of this host's part of a group call, with its rank in the role; of a
        function that is applied, with the number of the part."""
        if isinstance(part, WorkerContext):
            return CallRecord(role, part.rank, method)
        if (worker := self._workers.get(role)) is not None:
            return CallRecord(role, worker.context.rank, method)
        return CallRecord(role, part.index if role == DRIVER_ROLE else -1, method)

    @contextmanager
    def receiving(self, record: CallRecord) -> Iterator[None]:
        """Mark the host as working while a request is read, which may import modules."""
        self._begin(record)
        try:
            yield
        finally:
            self._current = None

    def run(self, request: CallRequest, part: Any) -> tuple[Batch | None, RankReply]:
        """Run this rank's part of a group call, and return its batch, if the rank answers, and its
        reply."""
        match request:
            case BuildRequest(role):
                self._open_output(part)
                record = self.make_record(role, part, "__init__")
                return self._recorded(record, lambda: self._build(request, part, record))
            case InvokeRequest(role, method):
                record = self.make_record(role, part, method)
                return self._recorded(record, lambda: self._invoke(request, part, record))
            case ApplyRequest(function):
                record = self.make_record(DRIVER_ROLE, part, get_callable_name(function))
                return self._recorded(record, lambda: self._apply(request, part))

    def _build(
        self, build: BuildRequest, context: WorkerContext, record: CallRecord
    ) -> _CallOutput:
        if context.rendezvous is not None and context.rank == 0:
            listener = self._listeners.pop(context.role)
            rendezvous = replace(context.rendezvous, listener=listener)
            context = replace(context, rendezvous=rendezvous)
        self._make_room(None)
        worker = build.worker_class(context, **build.keywords)
        worker.is_beside = build.worker_class.runs_beside(build.keywords)
        self._workers[context.role] = worker
        self._keywords[context.role], self._transfers[context.role] = build.keywords, {}
        worker.leave()
        self._in_memory = worker if worker.takes_memory else None
        record.metrics.update(worker.record.metrics)
        places = dict(worker.coordinates())
        self._stages[context.role] = places["pp"].index if "pp" in places else 0
        return None, places, None

    def _invoke(
        self, request: InvokeRequest, mine: RankAssignment, record: CallRecord
    ) -> _CallOutput:
        if (worker := self._workers.get(request.role)) is None:
            raise DataError(f"No group called `{request.role}` lives on this device.")
        method = getattr(worker, request.method)
        transfers = self._transfers[request.role]
        if request.method not in transfers:
            transfers[request.method] = method.__transfer__.bind(self._keywords[request.role])
        transfer = transfers[request.method]
        rows, total, first = None, None, None

        def read(argument: Any) -> Any:
            """A batch's rows of this rank: the first batch says which, for all."""
            nonlocal rows, first
            if not isinstance(argument, BatchRef):
                return argument
            copies = argument.node.copies
            work = worker.attention_length, worker.shares_prompts
            part = transfer.part(mine.index, mine.parts, copies, *work)
            if first is None:
                first = argument
                rows = argument.rows_of(part) if transfer.rows is None else transfer.rows(worker)
            elif argument.node.num_rows() != first.node.num_rows():
                counts = first.node.num_rows(), argument.node.num_rows()
                raise build_row_count_error(f"{record.role}.{record.method}", counts)
            return argument.read(part, rows)[0]

        with self._inputs():
            arguments = [read(argument) for argument in request.arguments]
            keywords = {name: read(argument) for name, argument in request.keywords.items()}
        given = (*arguments, *keywords.values())
        record.tokens = sum(count_tokens(each) for each in given if isinstance(each, Batch))
        record.stage, record.beside = self._stages[request.role], self._is_lane
        worker.record, worker.rows = record, rows
        worker.table_rows = 0 if first is None else first.node.num_rows()
        if worker.takes_memory:
            self._make_room(worker)
        worker.enter()
        value = method(*arguments, **keywords)
        worker.leave()
        if not transfer.returns_batch:
            return None, value if mine.answers else None, None
        if isinstance(value, PartialTable):
            value, rows, total = value
        if first is not None and first.only is not None:
            total = first.only.num_rows()
        _check_result(record, value, rows)
        record.tokens += count_tokens(value)
        name = f"`{record.role}.{record.method}`"
        if mine.answers:
            _check_columns(name, value, transfer.columns)
            return value, None, ShardInfo.of(value, np.arange(0) if rows is None else rows, total)
        return None, None, None

    def _make_room(self, worker: Worker | None) -> None:
        """Offload the role whose models were on the device last, to make room for another role or a
        new one."""
        if self._in_memory not in (None, worker):
            self._in_memory.make_room()
        self._in_memory = worker

    def _apply(self, request: ApplyRequest, mine: RankAssignment) -> _CallOutput:
        with self._inputs():
            part = PartitionSelection(mine.index, mine.parts, "rows", request.together)
            batch, rows = request.table.read(part)
        result = request.function(batch)
        name = f"The applied function {get_callable_name(request.function)}"
        if not isinstance(result, Batch):
            raise DataError(f"{name} returned a {type(result).__name__}; it must return a Batch.")
        if len(result) != len(rows):
            raise DataError(f"{name} made {len(result)} rows of {len(rows)}.")
        _check_columns(name, result, request.makes)
        total = None if request.table.only is None else request.table.only.num_rows()
        return result, None, ShardInfo.of(result, rows, total)

    def status(self) -> HostStatus:
        """Return what this host is doing now. Safe from any thread."""
        if (current := self._current) is None:
            return HostStatus()
        record, begin = current
        call = record.role, record.rank, record.method
        seconds = time.monotonic() - max(begin, record.progress)
        return HostStatus(*call, seconds, self._waiting, record.phase)

    def snapshot(self) -> HostSnapshot:
        """Return what this host is doing now, and where. Safe from any thread but the one that
        works."""
        return capture_snapshot(self.status(), self._thread)

    def close(self) -> None:
        """Close every worker, the last one first; one that fails to close does not keep the others
        from closing."""
        PINS.assign(None)
        with ExitStack() as closing:
            for worker in self._workers.values():
                closing.callback(worker.close)
                closing.callback(worker.enter)
            self._workers.clear()

    @contextmanager
    def _inputs(self) -> Iterator[None]:
        """Mark the call as waiting while its inputs are read. Its record and its deadline start
        after that."""
        self._waiting = True
        yield
        if self._current is not None:
            record = self._current[0]
            record.start = time.time()
            self._current, self._waiting = (record, time.monotonic()), False

    def _recorded(
        self, record: CallRecord, function: Callable[[], _CallOutput]
    ) -> tuple[Batch | None, RankReply]:
        self._direct_output(record.role)
        self._begin(record)
        record.start = time.time()
        waited, on_gpu = read_wait_seconds(), count_gpu_operations()
        try:
            self._faults.meet(record)
            batch, value, info = function()
        except UpstreamError as error:
            return None, RankReply(record, failure=error.failure)
        except BaseException as error:
            if self._raises:
                raise
            failure = build_worker_failure(error, record)
            logging.getLogger(__name__).error(
                "%s.%s failed:", record.role, record.method, exc_info=error
            )
            return None, RankReply(record, failure=failure)
        finally:
            record.end = time.time()
            if count_gpu_operations() == on_gpu:
                record.waited = read_wait_seconds() - waited
            self._current = None
        record.phases = dict(record.phases)
        return batch, RankReply(record, value, info)

    def _begin(self, record: CallRecord) -> None:
        self._current, self._waiting = (record, time.monotonic()), False
        self._thread = threading.get_ident()

    def _open_output(self, context: WorkerContext) -> None:
        if context.run_directory is None or not self._redirects:
            return
        path = context.run_directory / "logs" / f"{context.role}-{context.rank}.log"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._output[context.role] = os.open(path, flags, 0o644)

    def _direct_output(self, role: str) -> None:
        """Point this process's stdout and stderr, C libraries included, at the role's log."""
        descriptor = self._output.get(role)
        if descriptor is None or role == self._output_of:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        self._output_of = role


def build_worker_failure(error: BaseException, record: CallRecord) -> WorkerFailure:
    """Convert an exception to a `WorkerFailure` with the traceback from the worker's own code on,
    without the frames of the host. HybridRL's own errors need no traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    is_sentence = isinstance(error, HybridRLError) and error.__cause__ is None
    told = [] if is_sentence else traceback.format_exception(error.with_traceback(trace))
    try:
        message = f"{type(error).__name__}: {error}"
    except Exception:  # an exception of somebody's own that cannot say what it is
        message = type(error).__name__
    message, trace_text = redact(message), redact("".join(told))
    return WorkerFailure(record.role, record.rank, record.method, message, trace_text, time.time())


def _check_columns(name: str, batch: Batch, columns: ExpectedColumns) -> None:
    """Check that a result has exactly the columns that its method declares, since readers rely on
    them."""
    if lacking := sorted(columns.certain.difference(batch.columns)):
        raise DataError(
            f"{name} says that it makes {', '.join(lacking)}, but returned "
            f"{', '.join(batch.columns) or 'no columns'}. Mend its `makes`."
        )
    if more := [column for column in batch.columns if not columns.may_have(column)]:
        raise DataError(
            f"{name} returned {', '.join(more)}, which is not among the columns that it says it "
            f"makes: {columns}. Add it to `makes` (or `may_make`), or leave it out."
        )


def _check_result(record: CallRecord, value: Any, rows: Rows | None) -> None:
    name = f"`{record.role}.{record.method}`"
    if not isinstance(value, Batch):
        raise DataError(
            f"{name} is annotated `-> Batch` but returned a {type(value).__name__}. Return "
            "Batch.from_columns({...}), or annotate what it returns."
        )
    if rows is None and len(value):
        raise DataError(
            f"{name} returned a batch of {len(value)} rows and was given none: the rows that it "
            "returns are those of its first Batch or BatchRef."
        )
    given = 0 if rows is None else len(rows)
    if len(value) != given:
        raise DataError(
            f"{name} returned {len(value)} rows for {given}: a worker method that returns a batch "
            "returns one row for each that it was given."
        )
