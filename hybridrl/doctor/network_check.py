"""Check of the network that a job's processes use: host name, loopback, ports and proxies."""

from __future__ import annotations

import os
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from hybridrl.doctor.finding import Finding, note, ok, problem

LOOPBACK = "127.0.0.1"
RESOLVING_S = 3.0
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FEW_PORTS = 2000
RAY_HEAD = 6379
"""Of `ray start --head`, where no other is given."""


def check() -> Iterator[Finding]:
    """Yield findings on loopback, host name, ports and proxies."""
    yield loopback()
    yield host_name()
    yield from ports()
    yield from proxies()


def loopback() -> Finding:
    """Check that two sockets can talk over the loopback interface."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            server.settimeout(2)
            with socket.create_connection(server.getsockname(), timeout=2) as one:
                other, _ = server.accept()
                with other:
                    other.settimeout(2)
                    one.sendall(b"?")
                    other.recv(1)
    except OSError as error:
        return problem(
            "loopback",
            f"{LOOPBACK} cannot be talked to: {error}",
            "As root: ip link set lo up; and see that no firewall or sandbox forbids it.",
        )
    return ok("loopback", f"{LOOPBACK} works")


def host_name() -> Finding:
    """Check that the host name resolves to an address of this machine."""
    name, cure = socket.gethostname(), "Add the name to /etc/hosts."
    answers: list[str | OSError] = []

    def ask() -> None:
        try:
            answers.append(socket.gethostbyname(name))
        except OSError as error:
            answers.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(RESOLVING_S)
    if not answers:
        return note("host name", f"{name} is not resolved within {RESOLVING_S:g} s", cure)
    (answer,) = answers
    if isinstance(answer, OSError):
        return note("host name", f"{name} is not resolved: {answer}", cure)
    try:
        with socket.socket() as one:
            one.bind((answer, 0))
    except OSError:
        return note("host name", f"{name} is {answer}, which is no address of this machine", cure)
    return ok("host name", f"{name} is {answer}")


def ports() -> Iterator[Finding]:
    """Yield findings on the ephemeral port range, and on the port of a Ray head."""
    try:
        first, last = map(int, PORT_RANGE.read_text().split())
        if last - first < FEW_PORTS:
            yield note(
                "ports",
                f"only those from {first} to {last} are given out",
                "As root: sysctl -w net.ipv4.ip_local_port_range='32768 60999'.",
            )
        else:
            yield ok("ports", f"{first} to {last} are given out")
    except (OSError, ValueError):  # another kernel
        pass
    with socket.socket() as one:
        if one.connect_ex((LOOPBACK, RAY_HEAD)) == 0:
            yield note(
                "ports",
                f"{RAY_HEAD} is taken",
                "Jobs do not mind; `ray start --head` needs another --port.",
            )


def proxies() -> Iterator[Finding]:
    """Yield a note if a proxy would be used for addresses of this machine."""
    found = {
        name: url for name, url in urllib.request.getproxies_environment().items() if name != "no"
    }
    if not found:
        return
    names = ", ".join(f"{name}_proxy" for name in sorted(found))
    hosts = (LOOPBACK, "localhost")
    if caught := [one for one in hosts if not urllib.request.proxy_bypass_environment(one)]:
        known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        wanted = ",".join([*([known] if known else []), *hosts])
        yield note(
            "proxies",
            f"{names} would be asked for {' and '.join(caught)}: programs that you start do not "
            "reach a job's endpoint (those that the job starts do)",
            f"export no_proxy={wanted} NO_PROXY={wanted}",
        )
    else:
        yield ok("proxies", f"{names} are set, and not for this machine")
