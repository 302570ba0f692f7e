"""Check of the network that a job's processes use: host name, loopback, ports and proxies."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

from hybridrl.doctor.finding import DoctorFinding, report_note, report_ok, report_problem
from hybridrl.system.daemon_threads import DaemonThreads

LOOPBACK_ADDRESS = "127.0.0.1"
_RESOLVE_TIMEOUT_S = 3.0
_PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOW_PORTS = 2000
_RAY_HEAD_PORT = 6379
"""Of `ray start --head`, where no other is given."""


def check() -> Iterator[DoctorFinding]:
    """Yield findings on loopback, host name, ports and proxies."""
    yield check_loopback()
    yield check_host_name()
    yield from check_ports()
    yield from check_proxies()


def check_loopback() -> DoctorFinding:
    """Check that two sockets can talk over the loopback interface."""
    try:
        with socket.create_server((LOOPBACK_ADDRESS, 0)) as server:
            server.settimeout(2)
            with socket.create_connection(server.getsockname(), timeout=2) as one:
                other, _ = server.accept()
                with other:
                    other.settimeout(2)
                    one.sendall(b"?")
                    other.recv(1)
    except OSError as error:
        return report_problem(
            "loopback",
            f"{LOOPBACK_ADDRESS} cannot be talked to: {error}",
            "As root: ip link set lo up; and see that no firewall or sandbox forbids it.",
        )
    return report_ok("loopback", f"{LOOPBACK_ADDRESS} works")


def check_host_name() -> DoctorFinding:
    """Check that the host name resolves to an address of this machine."""
    name, cure = socket.gethostname(), "Add the name to /etc/hosts."
    asking = DaemonThreads().submit(socket.gethostbyname, name)
    if not wait([asking], _RESOLVE_TIMEOUT_S).done:
        return report_note(
            "host name", f"{name} is not resolved within {_RESOLVE_TIMEOUT_S:g} s", cure
        )
    try:
        answer = asking.result()
    except (OSError, UnicodeError) as error:  # the latter of a name that no resolver is asked for
        return report_note("host name", f"{name} is not resolved: {error}", cure)
    try:
        with socket.socket() as one:
            one.bind((answer, 0))
    except OSError:
        return report_note(
            "host name", f"{name} is {answer}, which is no address of this machine", cure
        )
    return report_ok("host name", f"{name} is {answer}")


def check_ports() -> Iterator[DoctorFinding]:
    """Yield findings on the ephemeral port range, and on the port of a Ray head."""
    try:
        first, last = map(int, _PORT_RANGE_FILE.read_text().split())
        if last - first < _LOW_PORTS:
            yield report_note(
                "ports",
                f"only those from {first} to {last} are given out",
                "As root: sysctl -w net.ipv4.ip_local_port_range='32768 60999'.",
            )
        else:
            yield report_ok("ports", f"{first} to {last} are given out")
    except (OSError, ValueError):  # another kernel
        pass
    with socket.socket() as one:
        if one.connect_ex((LOOPBACK_ADDRESS, _RAY_HEAD_PORT)) == 0:
            yield report_note(
                "ports",
                f"{_RAY_HEAD_PORT} is taken",
                "Jobs do not mind; `ray start --head` needs another --port.",
            )


def check_proxies() -> Iterator[DoctorFinding]:
    """Yield a note if a proxy would be used for addresses of this machine."""
    found = {
        name: url for name, url in urllib.request.getproxies_environment().items() if name != "no"
    }
    if not found:
        return
    names = ", ".join(f"{name}_proxy" for name in sorted(found))
    hosts = (LOOPBACK_ADDRESS, "localhost")
    if caught := [one for one in hosts if not urllib.request.proxy_bypass(one)]:
        known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        wanted = ",".join([*([known] if known else []), *hosts])
        yield report_note(
            "proxies",
            f"{names} would be asked for {' and '.join(caught)}: programs that you start do not "
            "reach a job's endpoint (those that the job starts do)",
            f"export no_proxy={wanted} NO_PROXY={wanted}",
        )
    else:
        yield report_ok("proxies", f"{names} are set, and not for this machine")
