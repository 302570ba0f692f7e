"""WorkerGroup: one role on its devices, called like an object; Handle: a result yet to come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.batch.batch import Batch
from hybridrl.controller.batch_ref import BatchRef
from hybridrl.controller.executor import Executor
from hybridrl.controller.group_call import (
    BuildRequest,
    CallResult,
    GroupCall,
    InvokeRequest,
    RankAssignment,
    build_row_count_error,
)
from hybridrl.controller.table_expression import ResultTable
from hybridrl.controller.transfer_protocol import (
    MethodTransfer,
    TransferProtocol,
    list_transfer_methods,
)
from hybridrl.controller.worker import Worker, WorkerContext
from hybridrl.errors import ConfigError, DataError, suggest_name


class Handle:
    """The result of a call that may still run."""

    def __init__(self, executor: Executor, call: GroupCall, one: bool) -> None:
        self._executor = executor
        self._call = call
        self._one = one

    @property
    def name(self) -> str:
        """The call's, for people."""
        return self._call.name

    def get(self) -> Any:
        """Wait for all ranks, and return the one answer or the list of answers by rank.

        Raises:
            WorkerError: if a rank failed or died; CallTimeoutError after the deadline.
        """
        self._executor.wait([self._call])
        values = [reply.value for reply in self._call.answers()]
        return values[0] if self._one else values

    def done_within(self, seconds: float | None) -> bool:
        """Wait for all ranks, at most this many seconds (None: no limit), and return whether they
        are done. Raises as `get` does."""
        return self._executor.wait([self._call], seconds)


class WorkerGroup:
    """A group of workers for one role: builds `worker_class(context, **keywords)` on each of
    `devices`, and spreads calls over them.

    Every method that the class marks with `@transfer` can be called on the group. A call returns
    at once. Groups on the same devices take turns in call order; groups on different devices run
    at the same time, as soon as their inputs are ready.

    Args:
        devices: Numbers of the devices in `executor.cluster`, in rank order.
    """

    def __init__(
        self,
        executor: Executor,
        role: str,
        worker_class: type[Worker],
        devices: Sequence[int],
        **keywords: Any,
    ) -> None:
        number = len(executor.cluster.devices)
        known = [d for d in devices if isinstance(d, int) and 0 <= d < number]
        if not known or len(set(known)) < len(devices):
            raise ConfigError(
                f"The group `{role}` was given the devices {list(devices)}: name one or more of 0 "
                f"to {number - 1}, each once."
            )
        self.role = role
        self.devices = list(devices)
        self.worker_class = worker_class
        self.keywords = keywords
        self._executor = executor
        self._transfers: dict[str, MethodTransfer] = {}
        self._spreads: dict[str, list[RankAssignment]] = {}
        contexts = [
            WorkerContext(
                role=role,
                rank=rank,
                world_size=len(self.devices),
                host=device,
                hosts=len(executor.cluster.devices),
                local_rank=executor.cluster.devices[device].index,
                device_kind=executor.cluster.kind,
                run_directory=executor.run_directory,
            )
            for rank, device in enumerate(self.devices)
        ]
        self._created = executor.create(BuildRequest(role, worker_class, keywords), contexts)

    def ready(self) -> WorkerGroup:
        """Wait until every rank is built."""
        self._executor.wait([self._created])
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):  # of an object that is being copied or unpickled
            raise AttributeError(name)
        if name not in self._transfers:
            self._transfers[name] = self._find_transfer(name)
        return partial(self._call, name)

    def _find_transfer(self, name: str) -> MethodTransfer:
        """Return how a method's batches are spread; raise AttributeError if there is no such
        method."""
        spec = getattr(getattr(self.worker_class, name, None), "__transfer__", None)
        if spec is None:
            known = list_transfer_methods(self.worker_class)
            raise AttributeError(
                f"The group `{self.role}` has no method `{name}` that the driver may call; "
                f"{self.worker_class.__name__} offers "
                f"{', '.join(known)}.{suggest_name(name, known)}"
            )
        found: MethodTransfer = spec.bind(self.keywords)
        return found

    def _call(self, method: str, /, *arguments: Any, **keywords: Any) -> BatchRef | Handle:
        transfer = self._transfers[method]
        arguments = tuple(self._refer(method, transfer, argument) for argument in arguments)
        keywords = {
            name: self._refer(method, transfer, argument) for name, argument in keywords.items()
        }
        parts = self._spread(method, transfer.protocol)
        batches = [a for a in (*arguments, *keywords.values()) if isinstance(a, BatchRef)]
        rows = self._rows_of(method, batches)
        if not transfer.returns_batch:
            request = InvokeRequest(self.role, method, arguments, keywords)
            call, _ = self._executor.submit(request, self.devices, parts)
            return Handle(self._executor, call, transfer.protocol.answers == "one")
        if not transfer.protocol.split:  # every rank holds the same rows: one copy is the table
            parts = [replace(part, answers=rank == 0) for rank, part in enumerate(parts)]
        results = []
        for some in _split_stream_arguments(arguments) if transfer.streams else [arguments]:
            request = InvokeRequest(self.role, method, some, keywords)
            call, data = self._executor.submit(request, self.devices, parts, returns_batch=True)
            results.append(CallResult(self._executor, call, data, transfer.columns, rows))
        return BatchRef(ResultTable(tuple(results), streamed=len(results) > 1), self._executor)

    @property
    def run_directory(self) -> Path | None:
        """Folder of the run; None when it keeps no files."""
        return self._executor.run_directory

    def _spread(self, method: str, protocol: TransferProtocol) -> list[RankAssignment]:
        """Return what each rank gets in a call of this method; computed once."""
        if method not in self._spreads:
            self.ready()
            places = [reply.value for reply in self._created.replies if reply is not None]
            self._spreads[method] = [
                RankAssignment(*protocol.part(place), protocol.speaks(rank, places))
                for rank, place in enumerate(places)
            ]
        return self._spreads[method]

    def _refer(self, method: str, transfer: MethodTransfer, argument: Any) -> Any:
        """Convert an argument for sending: a batch becomes a reference to the columns that the
        method reads."""
        if isinstance(argument, Handle) or _contains_batch_ref(argument):
            is_handle = isinstance(argument, Handle)
            what = "a Handle" if is_handle else "a BatchRef inside another value"
            raise DataError(
                f"`{self.role}.{method}` was given {what}. A batch has to be an argument of its "
                "own, and of a handle what its `get()` gives."
            )
        if isinstance(argument, Batch):
            argument = self._executor.put(argument)
        if isinstance(argument, BatchRef):
            return argument.for_reading(transfer.wanted, f"`{self.role}.{method}`")
        return argument

    def _rows_of(self, method: str, batches: Sequence[BatchRef]) -> int | None:
        """Return the number of rows that all batches of a call must share, as far as it is
        known."""
        counts = (batch.node.known_rows for batch in batches if batch.only is None)
        known = {count for count in counts if count is not None}
        if len(known) > 1:
            raise build_row_count_error(f"{self.role}.{method}", sorted(known))
        return known.pop() if known else None


def _contains_batch_ref(argument: Any) -> bool:
    """Return whether a list, tuple or dictionary contains a reference, which no rank could read."""
    if isinstance(argument, Mapping):
        argument = list(argument.values())
    if not isinstance(argument, list | tuple):
        return False
    return any(isinstance(value, BatchRef) or _contains_batch_ref(value) for value in argument)


def _split_stream_arguments(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the arguments once for each part of the streamed table that is the first of them."""
    match arguments:
        case (BatchRef() as table, *rest):
            return [(part, *rest) for part in table.by_parts()]
    return [arguments]
