"""RayHost: the Ray actor that holds the roles of one device. Importing this needs Ray."""

from __future__ import annotations

import contextlib
import gc
import importlib
import ipaddress
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch

from hybridrl.batch.batch import Batch
from hybridrl.batch.call_record import CallRecord
from hybridrl.controller.failures import HostIdentity
from hybridrl.controller.group_call import RankReply, Rows
from hybridrl.controller.host_health import HostSnapshot, HostStatus
from hybridrl.controller.worker import Rendezvous
from hybridrl.controller.worker_host import WorkerHost, build_worker_failure
from hybridrl.errors import ConfigError, HybridRLError
from hybridrl.ray_backend.call_messages import (
    deserialize_reply,
    deserialize_request,
    serialize_reply,
    split_header,
)
from hybridrl.ray_backend.ray_import import actor_method, ignore_interrupts, ray
from hybridrl.ray_backend.remote_result import (
    HostLocality,
    RemoteResult,
    ResultRefs,
    get_borrowed,
)
from hybridrl.system import core_pins, device_traits
from hybridrl.system.container_limits import count_usable_cores
from hybridrl.system.garbage_collection import pause_garbage_collection
from hybridrl.system.host_variables import THREADS, derive_host_environment
from hybridrl.system.redaction import redact_output

PRELOAD_METHOD = "preload"


@ray.remote(
    concurrency_groups={"work": 1, "beside": 1, "health": 3, "data": 4},
    max_restarts=0,
    max_task_retries=0,
)
class RayHost:
    """A `WorkerHost` in a process of its own.

    A call comes as a message of a header for this rank and a request for all, and the references
    that belong into it.

    Args:
        folder: The driver's working folder, so that relative paths mean the same here.
    """

    def __init__(self, folder: str) -> None:
        ignore_interrupts()
        redact_output()
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        _configure_network(ray.util.get_node_ip_address())
        with contextlib.suppress(OSError):  # no such folder here: then paths must be absolute
            os.chdir(folder)
        self._gpu = next(map(str, ray.get_gpu_ids()), "")
        self._host = WorkerHost()
        self._lane = self._host.make_lane()
        self._around = HostLocality()

    @actor_method(concurrency_group="health")
    def listen(self, role: str) -> Rendezvous:
        return self._host.listen(role, ray.util.get_node_ip_address())

    @actor_method(concurrency_group="health")
    def identity(self) -> HostIdentity:
        node = ray.get_runtime_context().get_node_id()
        return HostIdentity(ray.util.get_node_ip_address(), os.getpid(), node, self._gpu)

    @actor_method(concurrency_group="work")
    def open_gpu(self, gpus: Sequence[str], gpus_of_node: int) -> tuple[str, float]:
        """Set the environment of a host on a GPU, before anything here uses CUDA, and return the
        GPU's name and memory.

        Args:
            gpus: The GPUs of this job on this node, in the order of hosts.
            gpus_of_node: The number of all.
        """
        place, cores = gpus.index(self._gpu), count_usable_cores()
        os.environ.update(derive_host_environment(gpus, place, cores, gpus_of_node, os.environ))
        torch.set_num_threads(int(os.environ[THREADS]))  # torch was imported before
        return device_traits.open_gpu(place)

    @actor_method(concurrency_group="work")
    def preload(self, modules: Sequence[str]) -> None:
        # It works, as far as anybody asks, but on no call.
        with (
            self._host.receiving(CallRecord("host", 0, PRELOAD_METHOD)),
            pause_garbage_collection(),
        ):
            for module in modules:
                # What is missing is reported when it is used.
                with contextlib.suppress(ImportError, HybridRLError):
                    importlib.import_module(module)
        gc.freeze()  # vLLM collects three times while it starts, for half a second each

    @actor_method(concurrency_group="work")
    def run(
        self,
        message: bytes,
        references: Sequence[ResultRefs] = (),
        rendezvous: Rendezvous | None = None,
    ) -> Any:
        """Run this rank's part of a group call, and return the reply, after the batch if the call
        returns one. Calls that run beside others come in the group `beside`."""
        (part, role, method, returns_batch, beside), body = split_header(message)
        host = self._lane if beside else self._host
        record = host.make_record(role, part, method)
        try:
            with host.receiving(record):
                request = deserialize_request(
                    body,
                    lambda n, columns, rows: RemoteResult(
                        references[n], columns, rows, self._around
                    ),
                )
        except Exception as error:
            batch, reply = None, _build_unreadable_reply(record, error)
        else:
            if rendezvous is not None:
                part = replace(part, rendezvous=rendezvous)
            batch, reply = host.run(request, part)
        sealed = serialize_reply(reply, [reply.value])
        return (batch, sealed) if returns_batch else sealed

    @actor_method(concurrency_group="data")
    def gather(self, replies: Sequence[Any]) -> Any:
        """Return the replies of a call's ranks as one object, for the readers of its result."""
        found = [deserialize_reply(reply) for reply in get_borrowed(replies)]
        return serialize_reply(found, [reply.value for reply in found])

    @actor_method(concurrency_group="data")
    def rows(self, shard: Sequence[Any], rows: Rows, names: Sequence[str]) -> Batch:
        """Return the rows and columns of a shard on this node that a host on another node
        requests."""
        batch: Batch = get_borrowed(shard)[0]
        return batch.select(names).take(rows)

    @actor_method(concurrency_group="health")
    def introduce(self, actors: Sequence[Any], nodes: Sequence[str]) -> None:
        """Set the hosts of a job with several nodes, and the node of each."""
        here = ray.get_runtime_context().get_node_id()
        self._around = HostLocality(actors, nodes, here)

    @actor_method(concurrency_group="work")
    def close(self) -> None:
        try:
            self._host.close()
        except Exception:  # the job is over: it may not keep the other hosts from closing
            logging.getLogger(__name__).exception("Closing failed:")

    @actor_method(concurrency_group="health")
    def status(self) -> HostStatus:
        return self._busiest().status()

    @actor_method(concurrency_group="health")
    def assign_cores(self, of_phases: Mapping[str, core_pins.PoolCores]) -> frozenset[int]:
        return core_pins.PINS.assign(of_phases)  # by its module: Ray copies objects with this class

    @actor_method(concurrency_group="health")
    def clock(self) -> float:
        return time.time()

    @actor_method(concurrency_group="health")
    def snapshot(self) -> HostSnapshot:
        return self._busiest().snapshot()

    def _busiest(self) -> WorkerHost:
        """Return the thread that works, and of both the one that has worked for longer."""
        statuses = [(host.status(), host) for host in (self._host, self._lane)]
        return max(statuses, key=lambda one: (one[0].is_working, one[0].seconds))[1]


def _build_unreadable_reply(record: CallRecord, error: Exception) -> RankReply:
    cause = ConfigError(
        f"The call {record.role}.{record.method} could not be read: {type(error).__name__}: "
        f"{error}. A worker's class and all that it is called with must be importable where the "
        "workers run: install the module that defines them, or define them in the driver's own "
        "script."
    )
    cause.__cause__ = error
    return RankReply(record, failure=build_worker_failure(cause, record))


def _configure_network(address: str) -> None:
    """Make gloo and vLLM use the network on which Ray's nodes meet. By default they use the address
    of the machine's name, often 127.0.0.1 or 127.0.1.1. NCCL finds its interface, and InfiniBand,
    itself."""
    os.environ.setdefault("VLLM_HOST_IP", address)
    if ipaddress.ip_address(address).is_loopback:
        address = "127.0.0.1"  # its interface answers at all others, and lists this one
    for interface, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
