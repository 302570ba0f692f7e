"""Several hosts on one machine: network namespaces on a bridge, each link limited in rate.

with network(hosts=2, rate="400mbit") as hosts, ray_nodes(hosts) as nodes:
    hosts[0].run([sys.executable, "-m", "hybridrl.main", f"ray.address={nodes[0].cluster}"])

`ray_nodes` without hosts starts the nodes side by side on this machine. Whatever was started ends
with the `with` block: processes, namespaces, links, control groups and Ray's files. Where the
machine does not permit it (no root, no `ip` or `tc`) the test is skipped, with the reason.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

CGROUPS = Path("/sys/fs/cgroup")
OBJECT_STORE_BYTES = 256 << 20
# Ray's own networking threads and agents; and a token would have to be brought to every host.
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # hybridrl switches it off, for clusters of one machine, in processes that have imported it.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
}


@dataclass
class Host:
    """A machine of the lab.

    Attributes:
        address: Its IPv4 address, on a link of its own.
        namespace: Name of its network namespace.
        cpus: Numbers of this machine's cores that its processes may use; None: all.
        hides: Folders of this machine that the host does not see: they are empty there.
    """

    address: str
    namespace: str
    cpus: set[int] | None = None
    groups: list[Path] = field(default_factory=list)
    hides: list[Path] = field(default_factory=list)

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on this host; the options are Popen's."""
        before = ["ip", "netns", "exec", self.namespace]
        if self.cpus is not None:
            before += ["taskset", "-c", ",".join(map(str, sorted(self.cpus)))]
        if self.hides:  # `ip netns exec` gives each command a table of mounts of its own
            mounts = " && ".join(f"mount -t tmpfs none '{folder}'" for folder in self.hides)
            before += ["sh", "-c", f'{mounts} && exec "$@"', "sh"]
        options.setdefault("env", {**os.environ, **RAY_ENVIRONMENT})
        return subprocess.Popen([*before, *command], preexec_fn=self._enter_groups, **options)

    def run(self, command: Sequence[str], timeout: float = 240, **options: Any) -> str:
        """Runs a command on this host to its end; what it printed.

        Raises:
            RuntimeError: if its exit code is not 0, with what it printed.
        """
        with self.popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
        ) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            finally:
                process.kill()
        return _checked(command, process.returncode, output)

    def processes(self) -> list[psutil.Process]:
        """What runs on this host now."""
        pids = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False
        )
        return _alive(int(pid) for pid in pids.stdout.split())

    def fail(self) -> None:
        """Ends everything on this host at once, as a power cut does."""
        _end(self.processes)

    def disconnect(self) -> None:
        """Pulls the cable: nothing ends, and nobody hears of this host any more."""
        _ip("netns", "exec", self.namespace, "ip", "link", "set", "eth0", "down")

    def _enter_groups(self) -> None:
        for group in self.groups:
            (group / "cgroup.procs").write_text(str(os.getpid()))


@contextlib.contextmanager
def network(
    hosts: int = 2,
    rate: str | None = "400mbit",
    *,
    cpus: Sequence[set[int]] | None = None,
    cpu_share: float | None = None,
    memory_bytes: int | None = None,
) -> Iterator[list[Host]]:
    """Hosts that reach each other, and nothing else.

    Args:
        rate: What each host can send, and receive, in units of `tc` (`400mbit`); None: no limit.
        cpus: The cores of each host.
        cpu_share: So many cores' worth of time for each host.
        memory_bytes: So much memory for each host.
    """
    skip_where_not_permitted(limited=bool(cpu_share or memory_bytes))
    number = _free_number()
    bridge = f"hylab{number}"
    made: list[Host] = []
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for index in range(hosts):
            cores = cpus[index] if cpus else None
            host = Host(f"10.77.{number}.{index + 1}", f"{bridge}h{index}", cores)
            made.append(host)
            _connect(host, bridge, f"{bridge}e{index}", rate)
            host.groups += _limit(host.namespace, cpu_share, memory_bytes)
        yield made
    finally:
        for host in made:
            host.fail()
            subprocess.run(["ip", "netns", "del", host.namespace], check=False)
            for group in host.groups:
                with contextlib.suppress(OSError):
                    group.rmdir()
        subprocess.run(["ip", "link", "del", bridge], check=False)


@dataclass
class Node:
    """A node of a Ray cluster.

    Attributes:
        cluster: The address that a job joins, `ray.address`.
        dashboard: Port of the dashboard, on the head's loopback; 0: there is none.
        host: Where it runs; None: beside the others on this machine.
    """

    address: str
    cluster: str
    directory: Path
    host: Host | None = None
    dashboard: int = 0

    def processes(self) -> list[psutil.Process]:
        """The node's daemons and all that they started."""
        if self.host is not None:
            return self.host.processes()
        # The flag that `ray start` gives each daemon; a worker is a raylet's child.
        daemons = [p for p in psutil.process_iter() if str(self.directory) in _command(p)]
        children = [c for daemon in daemons for c in _children(daemon)]
        return _alive({process.pid for process in [*daemons, *children]})

    def fail(self) -> None:
        """Ends the node and everything on it at once."""
        _end(self.processes)


@contextlib.contextmanager
def ray_nodes(
    hosts: Sequence[Host] | None = None,
    *,
    nodes: int = 2,
    cpus: Sequence[int] | int = 2,
    dashboard: bool = False,
    environments: Sequence[dict[str, str]] = (),
) -> Iterator[list[Node]]:
    """A Ray cluster with a node on each host, or with `nodes` nodes on this machine. (There the
    first has this machine's own address: Ray gives no head a loopback address.)

    Args:
        cpus: CPU slots of each node, or of every node.
        dashboard: With the dashboard, which `ray job submit` talks to.
        environments: By node, what is added to the environment of it and its workers.
    """
    number = len(hosts) if hosts else nodes
    slots = [cpus] * number if isinstance(cpus, int) else list(cpus)
    started: list[Node] = []
    # Short, because the path of a Unix socket has at most 107 characters.
    root = Path(tempfile.mkdtemp(prefix="hy", dir="/tmp"))
    try:
        port = 6379 if hosts else _free_port()
        for index in range(number):
            host = hosts[index] if hosts else None
            address = host.address if host else f"127.0.0.{index + 1}"
            cluster = started[0].cluster if started else f"{address}:{port}"
            node = Node(address, cluster, root / str(index), host)
            node.dashboard = _free_port() if dashboard and not started else 0
            started.append(node)
            added = environments[index] if index < len(environments) else {}
            _start_node(node, slots[index], index == 0, added)
        yield started
    finally:
        for node in reversed(started):
            node.fail()
        shutil.rmtree(root, ignore_errors=True)


def skip_where_not_permitted(*, limited: bool = False) -> None:
    """Skips the test where this machine cannot make hosts, and says why."""
    if not sys.platform.startswith("linux"):
        pytest.skip("network namespaces need Linux")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for tool in ("ip", "tc", "taskset"):
        if shutil.which(tool) is None:
            pytest.skip(f"`{tool}` is not installed (iproute2, util-linux)")
    name = f"hyprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", name], check=False)
    if limited and not all((CGROUPS / kind).is_dir() for kind in ("cpu", "memory")):
        pytest.skip("limits of CPU time and memory need control groups of version 1")


def _connect(host: Host, bridge: str, link: str, rate: str | None) -> None:
    name = host.namespace
    _ip("netns", "add", name)
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", link, "master", bridge)
    _ip("link", "set", link, "up")
    inside = ["netns", "exec", name]
    _ip(*inside, "ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
    _ip(*inside, "ip", "link", "set", "eth0", "up")
    _ip(*inside, "ip", "link", "set", "lo", "up")
    if rate is None:
        return
    limit = ["root", "tbf", "rate", rate, "burst", "512kb", "latency", "200ms"]
    _ip(*inside, "tc", "qdisc", "replace", "dev", "eth0", *limit)  # what it sends
    _checked_run(["tc", "qdisc", "replace", "dev", link, *limit])  # what it receives


def _limit(name: str, cpu_share: float | None, memory_bytes: int | None) -> list[Path]:
    """Makes the control groups that hold a host to its limits."""
    made = []
    if cpu_share is not None:
        made.append(CGROUPS / "cpu" / name)
        made[-1].mkdir()
        period = int((made[-1] / "cpu.cfs_period_us").read_text())
        (made[-1] / "cpu.cfs_quota_us").write_text(str(int(period * cpu_share)))
    if memory_bytes is not None:
        made.append(CGROUPS / "memory" / name)
        made[-1].mkdir()
        (made[-1] / "memory.limit_in_bytes").write_text(str(memory_bytes))
    return made


def _start_node(node: Node, cpus: int, head: bool, environment: dict[str, str]) -> None:
    command = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        f"--node-ip-address={node.address}",
        f"--num-cpus={cpus}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--temp-dir={node.directory}",
        f"--dashboard-agent-listen-port={_free_port()}",  # another Ray may have the default
        "--disable-usage-stats",
    ]
    if head:
        command += ["--head", f"--port={node.cluster.rsplit(':')[1]}"]
        command += [f"--include-dashboard={str(bool(node.dashboard)).lower()}"]
        command += [f"--dashboard-port={node.dashboard}"] if node.dashboard else []
        command += ["--dashboard-host=127.0.0.1", f"--ray-client-server-port={_free_port()}"]
    else:
        command += [f"--address={node.cluster}"]
    settings = {"env": {**os.environ, **RAY_ENVIRONMENT, **environment}}
    if node.host is not None:
        node.host.run(command, timeout=240, **settings)
    else:
        _checked_run(command, timeout=240, **settings)


def _end(find: Any) -> None:
    """Kills what `find` finds until it finds nothing: a supervisor may start another meanwhile."""
    deadline = time.monotonic() + 60
    while (processes := find()) and time.monotonic() < deadline:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=2)


def _alive(pids: Any) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def _free_number() -> int:
    """A number that no lab of this machine has: it is in names and addresses."""
    there = psutil.net_if_addrs()
    return next(number for number in range(1, 255) if f"hylab{number}" not in there)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _ip(*arguments: str) -> None:
    _checked_run(["ip", *arguments])


def _checked_run(command: Sequence[str], timeout: float = 60, **options: Any) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, **options
    )
    _checked(command, done.returncode, done.stdout + done.stderr)


def _checked(command: Sequence[str], code: int, output: str) -> str:
    if code:
        raise RuntimeError(f"`{' '.join(command)}` ended with {code}:\n{output}")
    return output
