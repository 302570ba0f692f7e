"""RayHost: the Ray actor that holds the roles of one device. Importing this needs Ray."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridrl.errors import HybridRLError, MissingPackageError

# Read by Ray when it is imported: a cluster that we start ourselves listens on loopback only.
if "RAY_ADDRESS" not in os.environ:
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# Without it Ray warns, of accelerators it does not find, on every start.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray
except ImportError as error:
    raise MissingPackageError(
        "executor=ray needs Ray, which is not installed: pip install 'hybridrl[cpu]' (or "
        "'hybridrl[gpu]'). Or run without it, on one device: executor=inline rollout=transformers."
    ) from error

from hybridrl.controller.batch_ref import BatchRef
from hybridrl.controller.envelope import seal, unseal
from hybridrl.controller.host import Call, Host, Reply, Status
from hybridrl.controller.worker import Context, Rendezvous, Worker
from hybridrl.core.batch import Batch


@ray.remote(concurrency_groups={"work": 1, "health": 3}, max_restarts=0, max_task_retries=0)
class RayHost:
    """A `Host` in a process of its own."""

    def __init__(self) -> None:
        # Ctrl-C in a terminal reaches every process of the job; only the driver decides.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        self._host = Host(lambda reference: unseal(ray.get(reference)))

    @ray.method(concurrency_group="health")
    def listen(self, role: str) -> Rendezvous:
        return self._host.listen(role, ray.util.get_node_ip_address())

    @ray.method(concurrency_group="health")
    def identity(self) -> tuple[str, int]:
        """Node address and process id."""
        return ray.util.get_node_ip_address(), os.getpid()

    @ray.method(concurrency_group="work")
    def preload(self, modules: Sequence[str]) -> None:
        # What is missing is reported when it is used.
        for module in modules:
            with contextlib.suppress(ImportError, HybridRLError):
                importlib.import_module(module)

    @ray.method(concurrency_group="work")
    def create(
        self,
        context: Context,
        worker_class: type[Worker],
        keywords: Mapping[str, Any],
        rendezvous: Rendezvous,
    ) -> Reply:
        return self._host.create(replace(context, rendezvous=rendezvous), worker_class, keywords)

    @ray.method(concurrency_group="work", num_returns=2)
    def execute(self, call: Call | bytes) -> tuple[Batch | None, Reply | bytes]:
        batch, reply = self._host.execute(unseal(call))
        return batch, seal(reply)

    @ray.method(concurrency_group="work")
    def answer(self, call: Call | bytes) -> Reply | bytes:
        """As `execute`, for a call whose result travels in the reply."""
        return seal(self._host.execute(unseal(call))[1])

    @ray.method(concurrency_group="work", num_returns=2)
    def apply(
        self, function: Callable[[Batch], Batch], table: BatchRef
    ) -> tuple[Batch | None, Reply]:
        return self._host.apply(function, table)

    @ray.method(concurrency_group="work")
    def close(self) -> None:
        self._host.close()

    @ray.method(concurrency_group="health")
    def status(self) -> Status:
        return self._host.status()

    @ray.method(concurrency_group="health")
    def stacks(self) -> str:
        return self._host.stacks()
