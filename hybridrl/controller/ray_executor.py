"""RayExecutor: one Ray actor per device."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hybridrl.controller import failures
from hybridrl.controller.batch_ref import BatchRef
from hybridrl.controller.envelope import seal, unseal
from hybridrl.controller.executor import Executor
from hybridrl.controller.host import Call, Failure, Reply
from hybridrl.controller.ray_host import RayHost, ray
from hybridrl.controller.table import Shard
from hybridrl.controller.worker import Context, Worker
from hybridrl.core.batch import Batch
from hybridrl.core.cluster import Cluster, Device, choose_devices
from hybridrl.errors import ConfigError, HybridRLError, WorkerError

CLOSE_SECONDS = 4.0
"""How long hosts may take to close their workers before they are ended."""
ROOT_CAUSE_SECONDS = 1.0
"""After a failure, how long to listen for an earlier one or a death that may be its cause."""


class _Pending(NamedTuple):
    """A call that was not waited for: where it runs, since when, and its chapter."""

    host: int
    name: str
    since: float
    chapter: int


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

    Raises:
        ConfigError: if the cluster has fewer devices, or does not give them in time.
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
    ) -> None:
        super().__init__()
        self.run_directory = run_directory.absolute() if run_directory else None
        self._timeout = timeout_s
        self._started_ray = not ray.is_initialized()
        self._broken = False
        self._rendezvous: dict[str, Any] = {}
        self._pending: dict[Any, _Pending] = {}
        if self._started_ray:
            _start(address)
        try:
            there = ray.cluster_resources()
            kind, number = choose_devices(
                devices, num_devices, int(there.get("GPU", 0)), int(there.get("CPU", 0))
            )
            # On CPUs a host takes its share of the cores, and Ray gives it as many threads.
            share = there.get("CPU", 1) // number if kind == "cpu" and self._started_ray else 1
            self._reserve(kind, number, cpus_per_host or max(1.0, share), start_timeout_s, preload)
        except BaseException:
            self._disconnect()
            raise

    def _reserve(
        self, kind: str, devices: int, cpus: float, limit: float, preload: Sequence[str]
    ) -> None:
        bundle = {"CPU": cpus, "GPU": 1.0} if kind == "cuda" else {"CPU": cpus}
        self._bundles = ray.util.placement_group([bundle] * devices, strategy="PACK")
        if not self._bundles.wait(limit):
            ray.util.remove_placement_group(self._bundles)
            free = ray.available_resources()
            raise ConfigError(
                f"Ray did not give {devices} devices of kind `{kind}` within {limit:g} s "
                f"(ray.start_timeout_s): {free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} "
                "CPUs are free. Is another job using them?"
            )
        self._hosts = [
            RayHost.options(
                num_cpus=cpus,
                num_gpus=1 if kind == "cuda" else 0,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    self._bundles, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(devices)
        ]
        for host in self._hosts:
            host.preload.remote(preload)
        self._identities = ray.get([host.identity.remote() for host in self._hosts])
        self.cluster = Cluster(
            [Device(kind, node, i) for i, (node, _) in enumerate(self._identities)]
        )

    def create(
        self, context: Context, worker_class: type[Worker], keywords: Mapping[str, Any]
    ) -> Any:
        if context.rank == 0:
            self._rendezvous[context.role] = self._hosts[context.host].listen.remote(context.role)
        reply = self._hosts[context.host].create.remote(
            context, worker_class, keywords, self._rendezvous[context.role]
        )
        return self._track(reply, context.host, f"{context.role}.__init__")

    def submit(self, host: int, call: Call, returns_batch: bool) -> Shard:
        name = f"{call.role}.{call.method}"
        if returns_batch:
            data, reply = self._hosts[host].execute.remote(seal(call))
            return Shard(data, self._track(reply, host, name))
        return Shard(None, self._track(self._hosts[host].answer.remote(seal(call)), host, name))

    def submit_apply(self, host: int, function: Callable[[Batch], Batch], table: BatchRef) -> Shard:
        data, reply = self._hosts[host].apply.remote(function, table)
        return Shard(data, self._track(reply, host, "driver.apply"))

    def store(self, value: Any) -> Any:
        return ray.put(value)

    def fetch(self, reference: Any) -> Any:
        return unseal(ray.get(reference))

    def wait(self, replies: Sequence[Any], limit: float | None = None) -> list[Reply] | None:
        late = {reply for reply in replies if reply in self._pending}
        if self._broken and late:
            raise WorkerError("The job has failed before; its workers take no more calls.")
        until = math.inf if limit is None else time.monotonic() + limit
        patience = min(5.0, self._timeout / 4)
        checked = time.monotonic()
        while late:
            left = until - time.monotonic()
            if left <= 0:
                return None
            # All at once, because each question costs; a failure among them is seen in a second.
            try:
                found = _replies(list(replies), min(1.0, patience, left))
            except (ray.exceptions.GetTimeoutError, ray.exceptions.RayError):
                pass  # some are late or lost: look at each
            else:
                self._take(replies, found)
                return found
            ready, _ = ray.wait(
                list(self._pending),
                num_returns=len(self._pending),
                timeout=0,
            )
            self._settle(ready)
            late.difference_update(ready)
            if late and time.monotonic() - checked > patience:
                self._check_deadlines()
                checked = time.monotonic()
        return _replies(list(replies))

    def settle(self, chapter: int) -> None:
        self.wait([reply for reply, call in self._pending.items() if call.chapter <= chapter])

    def close(self) -> None:
        if not self._broken:
            closing = [host.close.remote() for host in self._hosts]
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        for host in self._hosts:
            ray.kill(host, no_restart=True)
        ray.util.remove_placement_group(self._bundles)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._started_ray:
            ray.shutdown()

    def _track(self, reply: Any, host: int, name: str) -> Any:
        self._pending[reply] = _Pending(host, name, time.monotonic(), self.chapter)
        return reply

    def _settle(self, finished: Sequence[Any]) -> None:
        """Takes finished calls off the list; raises if one of them failed."""
        death = None
        try:
            replies = _replies(finished)
        except ray.exceptions.RayError:
            replies = []
            for reference in finished:
                try:
                    replies += _replies([reference])
                except ray.exceptions.RayError as error:
                    host, name, *_ = self._pending[reference]
                    death = _death(host, name, error)
        if death is not None:  # outside the handler, so that Ray's own traceback is not chained
            self._fail(death)
        self._take(finished, replies)

    def _take(self, finished: Sequence[Any], replies: Sequence[Reply]) -> None:
        for reference, reply in zip(finished, replies, strict=True):
            call = self._pending.pop(reference, None)
            if call is None:
                continue  # taken before
            if reply.failure is not None:
                self._fail(reply.failure)
            self._records[call.chapter].append(reply.record)

    def _fail(self, first: Failure | failures.Death) -> None:
        """Raises the error behind a failure. A rank that dies makes its peers fail in their
        collectives: listen a moment for all of them, then report the one that is the cause."""
        self._broken = True
        found: list[Failure | failures.Death] = [first]
        until = time.monotonic() + ROOT_CAUSE_SECONDS
        waiting = list(self._pending)
        while waiting and (left := until - time.monotonic()) > 0:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            for reference in ready:
                host, name, *_ = self._pending[reference]
                try:
                    (reply,) = _replies([reference])
                except ray.exceptions.RayError as error:
                    found.append(_death(host, name, error))
                else:
                    found.extend([reply.failure] if reply.failure else [])
        raise failures.explain(found, self._identities, self.run_directory)

    def _check_deadlines(self) -> None:
        """Raises if a host has been running one call for longer than the deadline."""
        asked = [host.status.remote() for host in self._hosts]
        statuses = self._answers(asked, seconds=5.0)
        late = {}
        for host, status in enumerate(statuses):
            oldest = next((call for call in self._pending.values() if call.host == host), None)
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


def _death(host: int, name: str, error: Exception) -> failures.Death:
    refused = isinstance(error, ray.exceptions.RayTaskError)
    return failures.Death(host, name, str(error), refused)


def _replies(references: Sequence[Any], timeout: float | None = None) -> list[Reply]:
    return [unseal(reply) for reply in ray.get(list(references), timeout=timeout)]


def _start(address: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is not None:
            ray.init(address=address, **quiet)
            return
        ray.init(num_cpus=os.cpu_count(), include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise HybridRLError(
            f"Ray could not be reached at ray.address={address}: {error}"
            if address
            else f"Ray could not be started on this machine: {error}"
        ) from error
