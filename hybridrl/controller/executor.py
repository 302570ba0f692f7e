"""Executor: where hosts live and how the driver reaches them.

Two exist: `RayExecutor` (one process per device, any number of nodes) and `InlineExecutor` (one
host in the driver's own process, no Ray, so that `pdb` and profilers work).
"""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from hybridrl.batch.batch import Batch
from hybridrl.batch.call_record import DRIVER_ROLE, CallRecord
from hybridrl.controller.batch_ref import BatchRef, get_callable_name
from hybridrl.controller.group_call import (
    UNKNOWN,
    ApplyRequest,
    BuildRequest,
    CallRequest,
    CallResult,
    ExpectedColumns,
    GroupCall,
    InvokeRequest,
    RankAssignment,
    ShardInfo,
)
from hybridrl.controller.table_expression import ResultTable
from hybridrl.controller.worker import WorkerContext
from hybridrl.controller.worker_host import WorkerHost
from hybridrl.errors import ConfigError, DataError, WorkerError
from hybridrl.system.cluster_spec import ClusterSpec, DeviceSlot, resolve_devices
from hybridrl.system.core_pins import PINS, PoolCores

MAX_RECORDS = 50_000
"""The number of newest records that are kept until they are collected."""


class Executor(ABC):
    """The interface to a job's hosts: makes group calls, and keeps the record of each until it is
    done.

    Calls belong to steps, such as those of a training run, of which several may be under way at a
    time.

    Attributes:
        cluster: The devices, one host each.
        step: The number of the one that calls belong to now.
        takes_calls: False after a worker has failed or died, and after `close`.
        failure: The first line of the error that ended the job.
        notify: Told, in a sentence, what the user should know while calls run.
        has_lanes: Whether roles that `Worker.runs_beside` others do so.
    """

    has_lanes: ClassVar[bool] = False

    cluster: ClusterSpec
    run_directory: Path | None
    takes_calls = True
    failure = ""

    def __init__(self) -> None:
        self.step = 0
        self.notify: Callable[[str], None] = logging.getLogger(__name__).warning
        self._made = 0
        self._pending: dict[int, GroupCall] = {}
        weakref.finalize(self, warn_about_pending_calls, self._pending)
        self._roles: dict[int, dict[str, int]] = {}
        self._records: deque[tuple[int, CallRecord]] = deque(maxlen=MAX_RECORDS)

    @abstractmethod
    def _send(self, call: GroupCall, request: CallRequest, returns_batch: bool) -> Any:
        """Send a call, and return what `fetch` finds the batches of the answering ranks by.
        Every host runs calls in the order in which they were sent."""

    @abstractmethod
    def _store(self, batch: Batch, info: ShardInfo) -> Any:
        """Store a batch where hosts can fetch it, and return what `fetch` finds it by."""

    @abstractmethod
    def fetch(self, result: CallResult, index: int) -> Batch:
        """Return a shard of a result whose call is done."""

    @abstractmethod
    def wait(self, calls: Sequence[GroupCall], limit: float | None = None) -> bool:
        """Wait until these calls are done, at most `limit` seconds, and return whether they are.

        Raises:
            WorkerError: if any call failed meanwhile; LostError if any host died, CallTimeoutError
                if a call ran longer than the deadline.
        """

    @abstractmethod
    def close(self) -> None:
        """End all hosts, whatever they are doing; see `wait`."""

    def create(self, build: BuildRequest, contexts: Sequence[WorkerContext]) -> GroupCall:
        """Build a group: a worker on the host of each context, in rank order."""
        for context in contexts:
            if context.role in self._roles.get(context.host, ()):
                raise ConfigError(
                    f"There is a group called `{context.role}` on device {context.host} already; "
                    "two groups of one name need different devices, or different names."
                )
        call, _ = self.submit(build, [context.host for context in contexts], contexts)
        for context in contexts:
            self._roles.setdefault(context.host, {})[context.role] = context.rank
        return call

    def submit(
        self,
        request: CallRequest,
        hosts: Sequence[int],
        parts: Sequence[Any],
        returns_batch: bool = False,
    ) -> tuple[GroupCall, Any]:
        """Make a group call on these hosts, in rank order.

        Args:
            parts: What is each rank's own.

        Returns:
            The call's record, and what `fetch` finds the returned batches by.
        """
        if not self.takes_calls:
            raise self.refusal()
        match request:
            case BuildRequest(role):
                method = "__init__"
            case InvokeRequest(role, method):
                pass
            case ApplyRequest(function):
                role, method = DRIVER_ROLE, get_callable_name(function)
        self._made += 1
        call = GroupCall(
            self._made, role, method, hosts, parts, self.step, _find_input_calls(request)
        )
        self._pending[call.number] = call
        try:
            return call, self._send(call, request, returns_batch)
        except BaseException:
            self._pending.pop(call.number, None)
            raise

    def refusal(self) -> WorkerError:
        """Return the error for calls made after the job has failed or was closed."""
        why = f"has failed before: {self.failure}" if self.failure else "is closed."
        return WorkerError(f"The workers take no more calls, because the job {why}")

    def put(self, batch: Batch) -> BatchRef:
        """Store a batch of the driver once, where workers can read it."""
        if not isinstance(batch, Batch):
            raise DataError(
                f"`put` takes a Batch, this is a {type(batch).__name__}. "
                "Batch.from_columns({...}) makes one of tensors and lists."
            )
        info = ShardInfo.of(batch, np.arange(len(batch)))
        columns = ExpectedColumns(frozenset(batch.columns))
        data = self._store(batch, info)
        return BatchRef(
            ResultTable((CallResult(self, None, data, columns, len(batch), [info]),)), self
        )

    def apply(
        self,
        function: Callable[[Batch], Batch],
        table: BatchRef,
        makes: ExpectedColumns | None = None,
        on: Any = None,
        together: int | None = None,
    ) -> BatchRef:
        """Run a function on the hosts that hold a table's rows; see `BatchRef.apply`."""
        hosts = [0] if on is None else on.devices[: None if together else 1]
        parts = [RankAssignment(index, len(hosts)) for index in range(len(hosts))]
        request = ApplyRequest(function, table, together or 1, makes or UNKNOWN)
        call, data = self.submit(request, hosts, parts, returns_batch=True)
        result = CallResult(self, call, data, makes or UNKNOWN, table.node.known_rows)
        return BatchRef(ResultTable((result,)), self)

    def settle(self, step: int | None = None) -> None:
        """Wait until every call up to the end of this step (None: every call) is done. Raises as
        `wait` does, also for calls that nobody waits for."""
        self.wait([c for c in self._pending.values() if step is None or c.step <= step])

    def end_step(self) -> int:
        """End the step, so that later calls belong to the next one, and return its number."""
        self.step += 1
        return self.step - 1

    def take_records(self, step: int | None = None) -> list[CallRecord]:
        """Wait for every call up to the end of this step (None: the current one), and return the
        ranks' records of calls that were not returned before."""
        step = self.step if step is None else step
        self.settle(step)
        kept = list(self._records)
        self._records.clear()
        self._records.extend((number, record) for number, record in kept if number > step)
        return [record for number, record in kept if number <= step]

    @property
    def is_busy(self) -> bool:
        """True while calls are under way."""
        return bool(self._pending)

    def assign_cores(self, cores: Sequence[Mapping[str, PoolCores]]) -> list[frozenset[int]]:
        """Keep the pools of each host to these cores in its phases, and measure what these take;
        return the cores that each host may use. Empty if not all hosts answer."""
        return []

    def clocks_ahead(self) -> dict[int, float]:
        """Return by device how many seconds the clock of its machine is ahead of the driver's.
        Devices of the driver's machine, and devices that do not answer, may be missing."""
        return {}

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self.takes_calls:
                self.settle()
        finally:
            self.close()

    def _finished(self, call: GroupCall) -> None:
        """Move a call whose ranks have all replied from the pending calls to the records."""
        if self._pending.pop(call.number, None) is None:
            return
        for host, reply in zip(call.hosts, call.replies, strict=True):
            if reply is not None:
                record = reply.record
                record.call, record.host, record.reads = call.number, host, call.reads
                self._records.append((call.step, record))


def _find_input_calls(request: CallRequest) -> tuple[int, ...]:
    """Return the numbers of the calls whose results a request reads."""
    given: list[Any] = []
    match request:
        case InvokeRequest():
            given = [*request.arguments, *request.keywords.values()]
        case ApplyRequest():
            given = [request.table]
    calls = (each.calls for each in given if isinstance(each, BatchRef))
    return tuple(sorted(frozenset[int]().union(*calls)))


def warn_about_pending_calls(pending: Mapping[int, GroupCall]) -> None:
    """Warn of pending calls when a program ends, closes its executor or drops it."""
    if pending:
        names = ", ".join(dict.fromkeys(call.name for call in pending.values()))
        logging.getLogger(__name__).warning(
            "The program ended before %d call(s) were done (%s), and they were cut off. Write "
            "`with Job(...) as job:`, whose end waits for them.",
            *(len(pending), names),
        )


class InlineExecutor(Executor):
    """An executor that runs every call at once, in the driver's process. Exceptions of workers
    reach the driver unchanged."""

    def __init__(self, devices: str = "auto", run_directory: Path | None = None) -> None:
        super().__init__()
        kind, _ = resolve_devices(devices, 1, torch.accelerator.device_count(), 1)
        self.cluster = ClusterSpec([DeviceSlot(kind, "localhost", 0)])
        self.run_directory = run_directory
        self._host = WorkerHost(raises=True, redirects=False)

    def _send(self, call: GroupCall, request: CallRequest, returns_batch: bool) -> Any:
        batch, reply = self._host.run(request, call.parts[0])
        call.replies[0] = reply
        self._finished(call)
        return batch

    def _store(self, batch: Batch, info: ShardInfo) -> Batch:
        return batch

    def fetch(self, result: CallResult, index: int) -> Batch:
        batch: Batch = result.data
        return batch

    def wait(self, calls: Sequence[GroupCall], limit: float | None = None) -> bool:
        return True  # every call is done when it returns

    def assign_cores(self, cores: Sequence[Mapping[str, PoolCores]]) -> list[frozenset[int]]:
        return [PINS.assign(one) for one in cores]

    def close(self) -> None:
        self.takes_calls = False
        self._host.close()
