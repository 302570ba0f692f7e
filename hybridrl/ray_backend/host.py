"""RayHost: the Ray actor that holds the roles of one device. Importing this needs Ray."""

from __future__ import annotations

import contextlib
import gc
import importlib
import ipaddress
import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil

from hybridrl.controller.envelope import seal, unseal
from hybridrl.controller.failures import Identity
from hybridrl.controller.host import Host, Reply, Status
from hybridrl.controller.worker import Rendezvous
from hybridrl.core.batch import Batch
from hybridrl.core.garbage import no_collection
from hybridrl.core.record import Record
from hybridrl.errors import HybridRLError
from hybridrl.ray_backend.library import ray
from hybridrl.ray_backend.message import unpack


@ray.remote(concurrency_groups={"work": 1, "health": 3}, max_restarts=0, max_task_retries=0)
class RayHost:
    """A `Host` in a process of its own.

    What the driver calls comes as a message of a head for this rank and a body for all, and the
    references that belong into it; see `message`.

    Args:
        folder: The driver's working folder, so that relative paths mean the same here.
    """

    def __init__(self, folder: str) -> None:
        # Ctrl-C in a terminal reaches every process of the job; only the driver decides.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        _use_network_of(ray.util.get_node_ip_address())
        with contextlib.suppress(OSError):  # no such folder here: then paths must be absolute
            os.chdir(folder)
        self._host = Host(lambda reference: unseal(ray.get(reference)))

    @ray.method(concurrency_group="health")
    def listen(self, role: str) -> Rendezvous:
        return self._host.listen(role, ray.util.get_node_ip_address())

    @ray.method(concurrency_group="health")
    def identity(self) -> Identity:
        node = ray.get_runtime_context().get_node_id()
        return Identity(ray.util.get_node_ip_address(), os.getpid(), node)

    @ray.method(concurrency_group="work")
    def preload(self, modules: Sequence[str]) -> None:
        with no_collection():
            for module in modules:
                # What is missing is reported when it is used.
                with contextlib.suppress(ImportError, HybridRLError):
                    importlib.import_module(module)
        gc.freeze()  # vLLM collects three times while it starts, for half a second each

    @ray.method(concurrency_group="work")
    def create(
        self, message: bytes, rendezvous: Rendezvous, references: Sequence[Any] = ()
    ) -> Reply:
        context, (worker_class, keywords) = unpack(message, references)
        return self._host.create(replace(context, rendezvous=rendezvous), worker_class, keywords)

    @ray.method(concurrency_group="work", num_returns=2)
    def execute(
        self, message: bytes, references: Sequence[Any] = ()
    ) -> tuple[Batch | None, Reply | bytes]:
        place, call = unpack(message, references)
        batch, reply = self._host.execute(call, place)
        return batch, seal(reply)

    @ray.method(concurrency_group="work")
    def answer(self, message: bytes, references: Sequence[Any] = ()) -> Reply | bytes:
        """As `execute`, for a call whose result travels in the reply."""
        place, call = unpack(message, references)
        return seal(self._host.execute(call, place)[1])

    @ray.method(concurrency_group="work", num_returns=2)
    def apply(
        self, message: bytes, references: Sequence[Any] = ()
    ) -> tuple[Batch | None, Reply | bytes]:
        _, (function, table) = unpack(message, references)
        batch, reply = self._host.apply(function, table)
        return batch, seal(reply)

    @ray.method(concurrency_group="work")
    def close(self, message: bytes) -> Reply | bytes:
        try:
            self._host.close()
        except Exception:  # the job is over: it may not keep the other hosts from closing
            logging.getLogger(__name__).exception("Closing failed:")
        return seal(Reply(Record("driver", 0, "close")))

    @ray.method(concurrency_group="health")
    def status(self) -> Status:
        return self._host.status()

    @ray.method(concurrency_group="health")
    def stacks(self) -> str:
        return self._host.stacks()


def _use_network_of(address: str) -> None:
    """Lets gloo and vLLM use the network on which Ray's nodes meet. By themselves they take the
    address that the machine's name stands for, often 127.0.0.1 or 127.0.1.1. NCCL looks for itself,
    and for InfiniBand."""
    os.environ.setdefault("VLLM_HOST_IP", address)
    if ipaddress.ip_address(address).is_loopback:
        address = "127.0.0.1"  # its interface answers at all others, and lists this one
    for interface, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
