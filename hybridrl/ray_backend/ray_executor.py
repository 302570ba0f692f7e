"""RayExecutor: one Ray actor per device."""

from __future__ import annotations

import contextlib
import math
import pickle
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hybridrl.batch.batch import Batch
from hybridrl.batch.call_record import DRIVER_ROLE, CallRecord
from hybridrl.controller.executor import Executor, warn_about_pending_calls
from hybridrl.controller.failures import (
    HostDeath,
    HostIdentity,
    HostRegistry,
    build_root_cause_error,
    format_out_of_memory,
)
from hybridrl.controller.group_call import (
    BuildRequest,
    CallRequest,
    CallResult,
    GroupCall,
    InvokeRequest,
    RankReply,
    ShardInfo,
    WorkerFailure,
)
from hybridrl.errors import CallTimeoutError, ConfigError, DataError, LostError, WorkerError
from hybridrl.ray_backend import connection as ray_cluster
from hybridrl.ray_backend.call_messages import serialize_reply, serialize_request
from hybridrl.ray_backend.call_transport import (
    CallEnvelope,
    CallTransport,
    DirectTransport,
    LostReply,
    ReplyEvent,
)
from hybridrl.ray_backend.cluster_nodes import format_node_table, make_node_sort_key
from hybridrl.ray_backend.connection import ClusterConnection
from hybridrl.ray_backend.host_supervisor import HostSupervisor
from hybridrl.ray_backend.ray_host import RayHost
from hybridrl.ray_backend.ray_import import ray
from hybridrl.ray_backend.relay_transport import RelayTransport
from hybridrl.ray_backend.remote_result import ResultRefs
from hybridrl.system import user_code
from hybridrl.system.cluster_spec import ClusterSpec, DeviceSlot, DeviceSpec, resolve_devices
from hybridrl.system.core_pins import PoolCores
from hybridrl.system.deferred_interrupts import interrupts_deferred

HOST_CLOSE_SECONDS = 4.0
"""The time limit for hosts to close their workers before they are killed."""
FAILURE_POLL_SECONDS = 1.0
"""The interval at which failures of calls other than the awaited ones are noticed."""
ROOT_CAUSE_SECONDS = 1.0
"""After a failure, how long to listen for an earlier one or a death that may be its cause."""
MAX_DIRECT_HOSTS = 8
"""The number of hosts up to which each is called directly, which is quickest; more are called
through a relay, so that the driver's cost hardly grows with their number."""


class RayExecutor(Executor):
    """An executor with one actor per device of a Ray cluster: one that is joined already, or one
    that is started here and ended again.

    Args:
        devices: `cpu`, `cuda` or `auto`.
        num_devices: How many hosts; None: every GPU, or two CPU slots.
        connection: A connection that is left open, for other executors to come; None starts a
            local cluster.
        timeout_s: Longest time a call may run.
        heartbeat_s: A host that does not answer for so long while it has a call is named.
        start_timeout_s: Longest wait for the cluster to give the devices.
        cpus_per_host: None: the cores are shared out.
        preload: Modules that the hosts import at once, while the driver prepares.
        run_directory: The folder of the run; None: there is none.
        paths: Files that every node of a cluster has to see, by the setting that they come from.
        folders: Folders and URLs that workers read, by setting.
        written: The settings of those that they write to.

    Raises:
        ConfigError: if the cluster has fewer devices, does not give them in time, or has nodes
            that cannot take part.
        LostError: if a host ends while it starts.

    Attributes:
        cpus_per_host: Cores of each host.
        nodes: Where each host lives, by Ray's name for it.
    """

    has_lanes = True

    def __init__(
        self,
        devices: str = "auto",
        num_devices: int | None = None,
        *,
        connection: ClusterConnection | None = None,
        timeout_s: float = 1800.0,
        heartbeat_s: float = 60.0,
        start_timeout_s: float = 120.0,
        cpus_per_host: float | None = None,
        preload: Sequence[str] = (),
        run_directory: Path | None = None,
        paths: Mapping[str, Path] | None = None,
        folders: Mapping[str, str] | None = None,
        written: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.run_directory = run_directory.absolute() if run_directory else None
        self._timeout = timeout_s
        self._heartbeat = heartbeat_s
        for module in user_code.list_loaded_files():  # whose names mean nothing to workers
            ray.cloudpickle.register_pickle_by_value(module)
        self._shares_connection = connection is not None
        self._connection = connection or ClusterConnection(None)
        self._bundles = None
        self._beside: set[str] = set()  # roles whose calls run beside others
        try:
            self._nodes = {node.id: node for node in ray_cluster.list_nodes()}
            kind, number = self._choose(devices, num_devices, cpus_per_host or 1.0)
            cpus = cpus_per_host or 1.0
            if cpus_per_host is None and kind == "cpu" and self._connection.is_own:
                cpus = ray_cluster.compute_cpus_per_host(list(self._nodes.values()), number)
            self.cpus_per_host = cpus
            self._bundles = ray_cluster.reserve_devices(kind, number, cpus, start_timeout_s)
            if self._connection.joined or len(self._nodes) > 1:
                seen = {setting: str(path.absolute()) for setting, path in (paths or {}).items()}
                used = folders or {}, written
                ray_cluster.check_nodes(self._bundles, start_timeout_s, seen, *used)
            self._start_hosts(kind, number, cpus, preload, start_timeout_s)
        except BaseException:
            self._connection.keep_logs()
            self._give_back()
            raise

    def _choose(self, devices: str, number: int | None, cpus_per_host: float) -> tuple[str, int]:
        nodes = list(self._nodes.values())
        gpus = int(sum(node.gpus for node in nodes))
        slots = sum(node.slots("cpu", cpus_per_host) for node in nodes)
        try:
            return resolve_devices(devices, number, gpus, slots)
        except ConfigError as error:
            raise ConfigError(
                f"{error} The nodes of the Ray cluster:\n{format_node_table(nodes)}"
            ) from None

    def _start_hosts(
        self, kind: str, number: int, cpus: float, preload: Sequence[str], start_timeout_s: float
    ) -> None:
        actor: Any = RayHost
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        gpus, hosts = 1 if kind == "cuda" else 0, []
        for index in range(number):
            at = place(self._bundles, placement_group_bundle_index=index)
            made = actor.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=at)
            hosts.append(made.remote(str(Path.cwd())))
        try:
            identities = ray.get([h.identity.remote() for h in hosts], timeout=start_timeout_s)
            # The devices of a node are neighbours, so that what talks most stays inside it.
            order = sorted(range(number), key=lambda index: _make_host_sort_key(identities[index]))
            self._hosts = [hosts[index] for index in order]
            self._identities = [identities[index] for index in order]
            if kind == "cuda":
                self._open_gpus(start_timeout_s)
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            why = format_out_of_memory(str(error)) or f" {error}"
            raise LostError(f"A host process ended before it could start.{why}") from None
        except ray.exceptions.GetTimeoutError:
            raise WorkerError(
                f"The {number} host processes did not start within {start_timeout_s:g} s "
                "(ray.start_timeout_s): a node is overloaded, or Ray's own logs say more."
            ) from None
        for host in self._hosts:
            host.preload.remote(preload)
        self._known = HostRegistry(self._identities, self._roles, self.run_directory)
        self._supervision = HostSupervisor(
            self._hosts,
            self._known,
            self._nodes,
            self._connection,
            timeout_s=self._timeout,
            heartbeat_s=self._heartbeat,
            oldest=self._oldest,
            notify=lambda sentence: self.notify(sentence),
        )
        self._transport: CallTransport = DirectTransport(self._hosts)
        if number > MAX_DIRECT_HOSTS:
            self._transport = RelayTransport(self._hosts, self._timeout)
        self.nodes = [identity.node for identity in self._identities]
        if len(set(self.nodes)) > 1:
            for host in self._hosts:
                host.introduce.remote(self._hosts, self.nodes)
        devices = [
            DeviceSlot(kind, one.address, self.nodes[:index].count(one.node), one.model)
            for index, one in enumerate(self._identities)
        ]
        memory: dict[str, float] = {}  # the least of each model of GPU
        for one in self._identities:
            if one.model:
                memory[one.model] = min(one.memory, memory.get(one.model, math.inf))
        self.cluster = ClusterSpec(devices, {name: DeviceSpec(m) for name, m in memory.items()})

    def _open_gpus(self, limit: float) -> None:
        """Tell each host the job's GPUs on its node, and add its own GPU to what is known of it."""
        on_node: dict[str, list[str]] = {}
        for one in self._identities:
            on_node.setdefault(one.node, []).append(one.gpu)
        opening = [
            host.open_gpu.remote(on_node[one.node], int(self._nodes[one.node].gpus))
            for host, one in zip(self._hosts, self._identities, strict=True)
        ]
        self._identities = [
            one._replace(model=model, memory=memory)
            for one, (model, memory) in zip(
                self._identities, ray.get(opening, timeout=limit), strict=True
            )
        ]

    def _send(self, call: GroupCall, request: CallRequest, returns_batch: bool) -> Any:
        if len(self._pending) == 1:  # nobody had anything to do before
            self._supervision.work_begins()
        try:
            body, results = serialize_request(request)
        except (TypeError, AttributeError, RecursionError, pickle.PicklingError) as error:
            raise DataError(
                f"The call {call.name} cannot be sent: {type(error).__name__}: {error}. What a "
                "method is called with, and functions given to `apply`, must be picklable."
            ) from error
        if isinstance(request, BuildRequest):
            runs_beside = request.worker_class.runs_beside(request.keywords)
            (self._beside.add if runs_beside else self._beside.discard)(request.role)
        beside = isinstance(request, InvokeRequest) and request.role in self._beside
        order = CallEnvelope(
            call.number, call.role, call.method, call.hosts, call.parts, returns_batch, beside
        )
        with interrupts_deferred():  # else some ranks get it and wait in it for the others
            return self._transport.send(order, body, results)

    def _store(self, batch: Batch, info: ShardInfo) -> ResultRefs:
        reply = RankReply(CallRecord(DRIVER_ROLE, 0, "put"), info=info)
        return ResultRefs([ray.put(serialize_reply(reply, []))], [ray.put(batch)])

    def fetch(self, result: CallResult, index: int) -> Batch:
        begin = time.monotonic()
        while True:
            try:
                shard = self._transport.fetch(result.data, index)
                batch: Batch = ray.get(shard, timeout=FAILURE_POLL_SECONDS)
                return batch
            except ray.exceptions.GetTimeoutError:
                self._check()
                if time.monotonic() - begin < self._timeout:
                    continue
                name = result.call.name if result.call is not None else "put"
                sentence = (
                    f"A batch that {name} made could not be fetched within {self._timeout:g} s "
                    "(controller.timeout_s): its node is overloaded, or the network does not reach "
                    "it."
                )
                raise self._ended(CallTimeoutError(sentence)) from None
            except ray.exceptions.ObjectLostError as error:
                sentence = f"A batch was lost with the node on which it lay: {error}"
                raise self._ended(LostError(sentence)) from None

    def wait(self, calls: Sequence[GroupCall], limit: float | None = None) -> bool:
        until = math.inf if limit is None else time.monotonic() + limit
        at_most = min(FAILURE_POLL_SECONDS, self._supervision.patience)
        while late := [call for call in calls if not call.is_done]:
            if not self.takes_calls:
                raise self.refusal()
            left = max(0.0, until - time.monotonic())
            self._look([call.number for call in late], min(left, at_most))
            if not left:
                return all(call.is_done for call in calls)
            self._check()
        return True

    def assign_cores(self, cores: Sequence[Mapping[str, PoolCores]]) -> list[frozenset[int]]:
        asked = [h.assign_cores.remote(one) for h, one in zip(self._hosts, cores, strict=True)]
        try:
            found: list[frozenset[int]] = ray.get(asked, timeout=self._heartbeat)
        except ray.exceptions.RayError:  # whoever waits for their calls notices it
            return []
        return found

    def clocks_ahead(self) -> dict[int, float]:
        return self._supervision.clocks_ahead()

    def _check(self) -> None:
        """Check the cluster and the hosts while something is awaited; see
        `HostSupervisor.check`."""
        try:
            self._supervision.check()
        except LostError as error:
            if self._connection.fault():  # hosts may still work
                raise
            raise self._ended(error) from None

    def close(self) -> None:
        if self._bundles is None:  # closed before
            return
        if self.takes_calls:
            if sys.exc_info()[0] is None:  # else there is an error, which says enough
                warn_about_pending_calls(self._pending)
            closing = [host.close.remote() for host in self._hosts]
            with contextlib.suppress(ray.exceptions.RayError):
                ray.wait(closing, num_returns=len(closing), timeout=HOST_CLOSE_SECONDS)
        self.takes_calls = False
        self._pending.clear()
        self._give_back([*self._hosts, *self._transport.helpers()])

    def _give_back(self, actors: Sequence[Any] = ()) -> None:
        """Kill these actors, release the devices, and leave the cluster."""
        bundles, self._bundles = self._bundles, None

        def release() -> None:
            for actor in actors:
                ray.kill(actor, no_restart=True)
            if bundles is not None:
                ray.util.remove_placement_group(bundles)

        self._connection.request(release)
        if not self._shares_connection:
            self._connection.close()

    def _look(self, numbers: Sequence[int], seconds: float) -> None:
        """Record what calls have returned, waiting this long for these, and raise if one failed."""
        try:
            found = self._note(self._transport.poll(numbers, seconds))
        except WorkerError as error:  # of the relay
            fault = self._connection.fault()
            raise self._ended(LostError(fault) if fault else error) from None
        if found:
            self._fail(found)

    def _note(self, events: deque[ReplyEvent]) -> list[WorkerFailure | HostDeath]:
        """Enter replies into the pending calls, and return the failures among them."""
        found: list[WorkerFailure | HostDeath] = []
        while events:
            number, rank, reply = events[0]
            if (call := self._pending.get(number)) is not None:
                if isinstance(reply, LostReply):
                    found.append(_convert_lost_reply(call, rank, reply))
                else:
                    call.replies[rank] = reply
                    found += [reply.failure] if reply.failure is not None else []
                    if call.is_done:
                        self._finished(call)
            events.popleft()
        return found

    def _fail(self, found: list[WorkerFailure | HostDeath]) -> NoReturn:
        """Raise the error behind failures. A rank that dies makes its peers fail in their
        collectives, so listen a moment for all of them. Peers notice a lost node before Ray does,
        so check the nodes too."""
        self.takes_calls = False  # whatever else happens
        until = time.monotonic() + ROOT_CAUSE_SECONDS
        while self._pending and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(WorkerError):  # of the relay, which has told enough
                found += self._note(self._transport.poll(list(self._pending), left))
        if fault := self._connection.fault():
            raise self._ended(LostError(fault))
        found += self._supervision.lost()
        raise self._ended(
            build_root_cause_error(self._supervision.by_one_clock(found), self._known)
        )

    def _ended(self, error: WorkerError) -> WorkerError:
        """Return the error after marking the executor as failed, so that no further call is
        made."""
        self.takes_calls, self.failure = False, str(error).partition("\n")[0]
        return error

    def _oldest(self, host: int) -> tuple[GroupCall, int] | None:
        """Return the first pending call on a host, and the host's rank in it."""
        for call in list(self._pending.values()):
            for rank, at in enumerate(call.hosts):
                if at == host and call.replies[rank] is None:
                    return call, rank
        return None


def _make_host_sort_key(host: HostIdentity) -> tuple[Any, ...]:
    """Return a sort key: node by node, and there by the number of the GPU."""
    return *make_node_sort_key(host.node, host.address), len(host.gpu), host.gpu


def _convert_lost_reply(call: GroupCall, rank: int, lost: LostReply) -> WorkerFailure | HostDeath:
    if lost.died:
        return HostDeath(call, rank, lost.text)
    message = (
        f"what it returned could not be sent to the driver. A method that is not `-> Batch` may "
        f"return what can be pickled: numbers, texts, lists, dictionaries. {lost.text.strip()}"
    )
    return WorkerFailure(call.role, rank, call.method, message, "", time.time())
