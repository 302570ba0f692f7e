"""WorkerGroup: one role on its devices, called like an object; Handle: a result yet to come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybridrl.controller.batch_ref import BatchRef
from hybridrl.controller.executor import Executor
from hybridrl.controller.host import Call, Place
from hybridrl.controller.protocol import Protocol, Transfer
from hybridrl.controller.table import Shard, Table
from hybridrl.controller.worker import Context, Worker
from hybridrl.core.batch import Batch
from hybridrl.errors import nearest


class Handle:
    """The result of a call that may still run."""

    def __init__(self, executor: Executor, shards: Sequence[Shard], answers: list[int], one: bool):
        self._executor = executor
        self._replies = [shard.reply for shard in shards]
        self._answers = answers
        self._one = one

    def get(self) -> Any:
        """Waits for all ranks; gives the one answer, or the list of answers by rank.

        Raises:
            WorkerError: if a rank failed or died; CallTimeoutError after the deadline.
        """
        replies = self._executor.wait(self._replies)
        values = [replies[rank].value for rank in self._answers]
        return values[0] if self._one else values

    def done_within(self, seconds: float | None) -> bool:
        """Waits for all ranks, at most so long (None: as long as it takes); whether they are done.
        Raises as `get` does."""
        return self._executor.wait(self._replies, seconds) is not None


class WorkerGroup:
    """Builds `worker_class(context, **keywords)` on each of `devices` and spreads calls over them.

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
        self.role = role
        self.devices = list(devices)
        self._executor = executor
        self._class = worker_class
        self._spreads: dict[str, list[Place]] = {}
        contexts = [
            Context(
                role=role,
                rank=rank,
                world_size=len(self.devices),
                host=device,
                hosts=len(executor.cluster.devices),
                device_kind=executor.cluster.kind,
                run_directory=executor.run_directory,
            )
            for rank, device in enumerate(self.devices)
        ]
        self._created = executor.create(contexts, worker_class, keywords)

    def ready(self) -> WorkerGroup:
        """Waits until every rank is built."""
        self._executor.wait(self._created)
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._class, name, None)
        transfer = getattr(method, "__transfer__", None)
        if transfer is None:
            known = [
                n for n in dir(self._class) if hasattr(getattr(self._class, n), "__transfer__")
            ]
            raise AttributeError(
                f"The group `{self.role}` has no method `{name}` that the driver may call; "
                f"{self._class.__name__} offers {', '.join(known)}.{nearest(name, known)}"
            )
        return lambda *arguments, **keywords: self._call(name, transfer, arguments, keywords)

    def _call(
        self, method: str, transfer: Transfer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> BatchRef | Handle:
        arguments = tuple(self._refer(argument) for argument in arguments)
        keywords = {name: self._refer(argument) for name, argument in keywords.items()}
        spread = self._spread(method, transfer.protocol)
        answers = [rank for rank, (_, speaks) in enumerate(spread) if speaks]
        if not transfer.returns_batch:
            call = Call(self.role, method, arguments, keywords)
            shards = self._executor.submit(self.devices, call, spread, False)
            return Handle(self._executor, shards, answers, transfer.protocol.answers == "one")
        if not transfer.protocol.split:
            answers = answers[:1]  # every rank holds the same rows: one copy makes the table
        found: list[Shard] = []
        for part in _parts(arguments) if transfer.streams else [arguments]:
            call = Call(self.role, method, part, keywords)
            shards = self._executor.submit(self.devices, call, spread, True)
            found += [shards[rank] for rank in answers]
        return BatchRef(Table(tuple(found)), self._executor)

    def _spread(self, method: str, protocol: Protocol) -> list[Place]:
        """By rank: which part of how many it gets, and whether it answers. Worked out once."""
        if method not in self._spreads:
            places = [reply.value for reply in self._executor.wait(self._created)]
            self._spreads[method] = [
                (protocol.part(place), protocol.speaks(rank, places))
                for rank, place in enumerate(places)
            ]
        return self._spreads[method]

    def _refer(self, argument: Any) -> Any:
        return self._executor.put(argument) if isinstance(argument, Batch) else argument


def _parts(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments once for each part of the table that is the first of them."""
    match arguments:
        case (BatchRef() as table, *rest):
            return [(part, *rest) for part in table.by_parts()]
    return [arguments]
