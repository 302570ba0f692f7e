"""RayExecutor: one Ray actor per device."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from hybridrl.controller import failures
from hybridrl.controller.batch_ref import BatchRef
from hybridrl.controller.executor import Executor
from hybridrl.controller.host import Call, Failure, Place, Reply
from hybridrl.controller.table import Shard
from hybridrl.controller.worker import Context, Worker
from hybridrl.core import user_code
from hybridrl.core.batch import Batch
from hybridrl.core.cluster import Cluster, Device, choose_devices
from hybridrl.core.record import Record
from hybridrl.errors import ConfigError, WorkerError
from hybridrl.ray_backend import cluster as ray_cluster
from hybridrl.ray_backend.calls import Calls
from hybridrl.ray_backend.direct import DirectCalls
from hybridrl.ray_backend.host import RayHost
from hybridrl.ray_backend.library import ray
from hybridrl.ray_backend.nodes import by_address, table
from hybridrl.ray_backend.relayed import RelayedCalls
from hybridrl.ray_backend.watch import CallsFailedError

CLOSE_SECONDS = 4.0
"""How long hosts may take to close their workers before they are ended."""
DIRECT_HOSTS = 8
"""Up to so many hosts are called one by one, which is quickest; more, through a relay, so that the
driver's cost hardly grows with their number."""


class RayExecutor(Executor):
    """Hosts on a Ray cluster: the one at `address`, or one that is started here and ended again.

    Args:
        devices: `cpu`, `cuda` or `auto`.
        num_devices: How many hosts; None: every GPU, or two CPU slots.
        address: `auto`, `ray://...` or `host:port` joins a cluster; None starts a local one.
        timeout_s: Longest time a call may run.
        start_timeout_s: Longest wait for the cluster to give the devices.
        cpus_per_host: None: the cores are shared out.
        preload: Modules that the hosts import at once, while the driver prepares.
        paths: What every node of a cluster has to see, by the setting that it comes from.

    Raises:
        ConfigError: if the cluster has fewer devices, does not give them in time, or has nodes
            that cannot take part.
    """

    def __init__(
        self,
        devices: str = "auto",
        num_devices: int | None = None,
        *,
        address: str | None = None,
        run_directory: Path | None = None,
        timeout_s: float = 1800.0,
        start_timeout_s: float = 120.0,
        cpus_per_host: float | None = None,
        preload: Sequence[str] = (),
        paths: Mapping[str, Path] | None = None,
    ) -> None:
        super().__init__()
        self.run_directory = run_directory.absolute() if run_directory else None
        self._timeout = timeout_s
        self._started_ray = not ray.is_initialized()
        self._broken = False
        self._roles: dict[int, list[tuple[str, int]]] = {}
        self._unreachable: set[str] = set()
        for module in user_code.loaded_files():  # whose names mean nothing to workers
            ray.cloudpickle.register_pickle_by_value(module)
        joined = self._started_ray and ray_cluster.connect(address)
        try:
            self._nodes = {node.id: node for node in ray_cluster.nodes()}
            kind, number = self._choose(devices, num_devices, cpus_per_host or 1.0)
            share = ray_cluster.share(list(self._nodes.values()), number) if kind == "cpu" else 1.0
            cpus = cpus_per_host or (share if self._started_ray else 1.0)
            self._bundles = ray_cluster.reserve(kind, number, cpus, start_timeout_s)
            if joined or len(self._nodes) > 1:
                seen = {setting: str(path.absolute()) for setting, path in (paths or {}).items()}
                ray_cluster.check_nodes(self._bundles, start_timeout_s, seen)
            self._start_hosts(kind, number, cpus, preload)
        except BaseException:
            self._disconnect()
            raise

    def _choose(self, devices: str, number: int | None, cpus_per_host: float) -> tuple[str, int]:
        nodes = list(self._nodes.values())
        gpus = int(sum(node.gpus for node in nodes))
        slots = sum(node.slots("cpu", cpus_per_host) for node in nodes)
        try:
            return choose_devices(devices, number, gpus, slots)
        except ConfigError as error:
            raise ConfigError(f"{error} The nodes of the Ray cluster:\n{table(nodes)}") from None

    def _start_hosts(self, kind: str, number: int, cpus: float, preload: Sequence[str]) -> None:
        hosts = [
            RayHost.options(
                num_cpus=cpus,
                num_gpus=1 if kind == "cuda" else 0,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    self._bundles, placement_group_bundle_index=index
                ),
            ).remote(str(Path.cwd()))
            for index in range(number)
        ]
        relayed = RelayedCalls(self._note) if number > DIRECT_HOSTS else None
        for host in hosts:
            host.preload.remote(preload)
        try:
            identities = ray.get([host.identity.remote() for host in hosts])
        except ray.exceptions.RayActorError as error:
            raise WorkerError(f"A host process ended before it could start: {error}") from None
        # The devices of a node are neighbours, so that what talks most stays inside it.
        order = sorted(
            range(number),
            key=lambda index: by_address(identities[index].node, identities[index].address),
        )
        self._hosts = [hosts[index] for index in order]
        self._identities = [identities[index] for index in order]
        self._calls: Calls = relayed or DirectCalls(self._hosts, self._note)
        if relayed:
            relayed.connect(self._hosts)
        self.cluster = Cluster(
            [Device(kind, identity.address, i) for i, identity in enumerate(self._identities)]
        )

    def create(
        self, contexts: Sequence[Context], worker_class: type[Worker], keywords: Mapping[str, Any]
    ) -> list[Any]:
        for context in contexts:
            self._roles.setdefault(context.host, []).append((context.role, context.rank))
        return self._calls.create(contexts, worker_class, keywords, self.chapter)

    def submit(
        self, hosts: Sequence[int], call: Call, places: Sequence[Place], returns_batch: bool
    ) -> list[Shard]:
        return self._calls.submit(hosts, call, places, returns_batch, self.chapter)

    def submit_apply(self, host: int, function: Callable[[Batch], Batch], table: BatchRef) -> Shard:
        return self._calls.apply(host, function, table, self.chapter)

    def store(self, value: Any) -> Any:
        return ray.put(value)

    def fetch(self, reference: Any) -> Any:
        return self._calls.fetch(reference)

    def wait(self, replies: Sequence[Any], limit: float | None = None) -> list[Reply] | None:
        if self._broken and self._calls.late(replies):
            raise WorkerError("The job has failed before; its workers take no more calls.")
        until = math.inf if limit is None else time.monotonic() + limit
        patience = min(5.0, self._timeout / 4)
        while True:
            left = max(0.0, until - time.monotonic())
            found = self._wait(replies, min(patience, left))
            if found is not None or left <= patience:
                return found
            self._check_deadlines()

    def _wait(self, replies: Sequence[Any], seconds: float) -> list[Reply] | None:
        try:
            return self._calls.wait(replies, seconds)
        except CallsFailedError as error:
            failed = error.found
        except WorkerError:
            self._broken = True
            raise
        self._fail(failed)  # outside the handlers, so that nothing else is chained to the error

    def settle(self, chapter: int) -> None:
        self.wait(self._calls.until(chapter))

    def close(self) -> None:
        if not self._broken:
            self._calls.close(range(len(self._hosts)), CLOSE_SECONDS)
        for actor in [*self._hosts, *self._calls.helpers()]:
            ray.kill(actor, no_restart=True)
        ray.util.remove_placement_group(self._bundles)
        self._disconnect()

    def _note(self, chapter: int, record: Record) -> None:
        self._records[chapter].append(record)

    def _disconnect(self) -> None:
        if self._started_ray:
            ray.shutdown()

    def _fail(self, found: list[Failure | failures.Death]) -> NoReturn:
        """Raises the error behind failures. Of a node that is lost the peers know first, and Ray
        last: so it is asked for."""
        self._broken = True
        found += self._lost(range(len(self._hosts)))
        raise failures.explain(found, self._identities, self._roles, self.run_directory)

    def _lost(self, hosts: Iterable[int]) -> list[failures.Death]:
        """Of these hosts, those whose nodes cannot be reached."""
        if len(self._nodes) < 2:
            return []
        ids = list({self._identities[host].node for host in hosts})
        with ThreadPoolExecutor(16) as pool:
            reached = pool.map(ray_cluster.is_reachable, [self._nodes[node] for node in ids])
            lost = {node for node, there in zip(ids, reached, strict=True) if not there}
        calls = {call.host: call.name for call in reversed(self._calls.due())}
        return [
            failures.Death(host, calls.get(host, "the step"), "", with_node=True)
            for host in hosts
            if self._identities[host].node in lost
        ]

    def _check_deadlines(self) -> None:
        """Raises if a host has been running one call for longer than the deadline, or if nothing
        was heard of its node twice in a row."""
        asked = [host.status.remote() for host in self._hosts]
        statuses = self._answers(asked, seconds=5.0)
        lost = self._lost([host for host, status in enumerate(statuses) if status is None])
        nodes = {self._identities[death.host].node for death in lost}
        if again := [d for d in lost if self._identities[d.host].node in self._unreachable]:
            self._broken = True
            raise failures.explain(again, self._identities, self._roles, self.run_directory)
        self._unreachable = nodes
        late = {}
        due = self._calls.due()
        for host, status in enumerate(statuses):
            oldest = next((call for call in due if call.host == host), None)
            if status is None:  # cannot even say what it does: judge by the driver's own clock
                if oldest and time.monotonic() - oldest.since > self._timeout:
                    late[host] = oldest.name
            elif status.method and not status.waiting and status.seconds > self._timeout:
                late[host] = f"{status.role}.{status.method}"
        if late:
            self._broken = True
            stacks = self._answers([host.stacks.remote() for host in self._hosts], seconds=5.0)
            raise failures.timed_out(late, self._timeout, self._identities, stacks)

    @staticmethod
    def _answers(references: list[Any], seconds: float) -> list[Any]:
        """What came within `seconds`; None for a host that did not answer."""
        ready, _ = ray.wait(references, num_returns=len(references), timeout=seconds)
        found: dict[Any, Any] = {}
        for reference in ready:
            with contextlib.suppress(ray.exceptions.RayError):
                found[reference] = ray.get(reference)
        return [found.get(reference) for reference in references]
