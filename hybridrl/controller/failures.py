"""What went wrong, as one sentence with the traceback or log of the worker that is the cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hybridrl.controller.host import Failure
from hybridrl.errors import CallTimeoutError, WorkerError

LOG_LINES = 15


class Identity(NamedTuple):
    """Where a host runs: the node's address, the process id, and Ray's id of the node."""

    address: str
    pid: int
    node: str = ""


Identities = Sequence[Identity]
"""Of every host."""
Roles = Mapping[int, Sequence[tuple[str, int]]]
"""By host: the roles that live there, each with its rank."""


@dataclass(frozen=True)
class Death:
    """A host process ended while a call was due, alone or (`with_node`) because its whole node was
    lost; or (`refused`) it could not even read the call. `text` is what Ray says of it."""

    host: int
    call: str
    text: str
    refused: bool = False
    with_node: bool = False


def explain(
    found: Sequence[Failure | Death],
    identities: Identities,
    roles: Roles,
    run_directory: Path | None,
) -> WorkerError:
    """The error to report: a death comes before an exception, because a rank that dies makes its
    peers raise; a lost node before a single death; among exceptions the earliest is the cause."""
    deaths = [item for item in found if isinstance(item, Death)]
    if lost := next((death for death in deaths if death.with_node), None):
        return node_lost(identities[lost.host].node, lost.call, identities, roles)
    if deaths:
        return _of_death(deaths[0], identities, run_directory)
    cause = min((item for item in found if isinstance(item, Failure)), key=lambda item: item.time)
    return WorkerError(
        f"{cause.role}.{cause.method} failed on rank {cause.rank}: {cause.message}\n\n"
        f"{cause.traceback.rstrip()}"
    )


def node_lost(node: str, call: str, identities: Identities, roles: Roles) -> WorkerError:
    """The error for a node of which nothing is heard any more, seen by `call`."""
    hosts = [host for host, identity in enumerate(identities) if identity.node == node]
    ranks: dict[str, list[str]] = {}
    for host in hosts:
        for role, rank in roles.get(host, ()):
            ranks.setdefault(role, []).append(str(rank))
    lived = ", ".join(
        f"{role} rank{'s' if len(numbers) > 1 else ''} {' '.join(numbers)}"
        for role, numbers in ranks.items()
    )
    left = len(identities) - len(hosts)
    without = f", or go on without it (num_devices={left})," if left else ""
    return WorkerError(
        f"Node {identities[hosts[0]].address} ({lived}) was lost during {call}: its machine or its "
        "Ray process ended, or the network does not reach it; bring it back (`ray status` shows "
        f"it){without} and start the job again."
    )


def timed_out(
    late: Mapping[int, str],
    limit: float,
    identities: Identities,
    stacks: Sequence[str | None],
) -> CallTimeoutError:
    """The error for calls that ran longer than `limit` seconds, with the stacks of every host."""
    who = ", ".join(f"{call} on rank {host}" for host, call in late.items())
    text = []
    for host, stack in enumerate(stacks):
        identity = identities[host]
        text.append(f"--- host {host} (process {identity.pid} on {identity.address}) ---")
        text.append(
            stack
            or "did not answer within 5 s: stopped, or blocked in native code (see `py-spy dump`)"
        )
    return CallTimeoutError(
        f"{who} did not finish within {limit:g} s (controller.timeout_s). If the work is only "
        "slow, raise that setting. The stacks of every host:\n\n" + "\n".join(text)
    )


def _of_death(death: Death, identities: Identities, run_directory: Path | None) -> WorkerError:
    node, pid, _ = identities[death.host]
    role = death.call.split(".")[0]
    if death.refused:
        return WorkerError(
            f"Rank {death.host} could not read the call {death.call}. A worker's class and all "
            "that it is called with must be importable where the workers run: install the module "
            f"that defines them, or define them in the driver's own script.\n\n{death.text}"
        )
    sentence = f"Rank {death.host} (process {pid} on {node}) died during {death.call}."
    if "OutOfMemory" in death.text or "memory monitor" in death.text:
        sentence += " Ray's memory monitor ended it: the machine ran out of memory."
    else:
        sentence += (
            " A process that ends without a traceback was killed from outside (kill -9, the"
            " kernel's out-of-memory killer) or crashed in native code."
        )
    if run_directory is None:
        return WorkerError(sentence)
    log = run_directory / "logs" / f"{role}-{death.host}.log"
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
    tail = "\n".join(f"  {line}" for line in lines) or "  (empty)"
    return WorkerError(f"{sentence}\nThe last lines of {log}:\n{tail}")
