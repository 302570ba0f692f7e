"""Report failures: one sentence with the traceback or log of the worker that is the cause."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hybridrl.controller.group_call import GroupCall, WorkerFailure
from hybridrl.errors import LostError, WorkerError

LOG_TAIL_LINES = 15


class HostIdentity(NamedTuple):
    """The location of a host: node address, process id, Ray's node id, and the name (as in
    CUDA_VISIBLE_DEVICES), the model and the memory (bytes) of its GPU, if it has one. As text it is
    the process and its node."""

    address: str
    pid: int
    node: str = ""
    gpu: str = ""
    model: str = ""
    memory: float = 0.0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.address}"


@dataclass(frozen=True)
class HostDeath:
    """The end of a rank's host process while a call was pending, alone or (`with_node`) because its
    whole node was lost. `text` is Ray's message."""

    call: GroupCall
    rank: int
    text: str
    with_node: bool = False

    @property
    def host(self) -> int:
        """The host that ended."""
        return self.call.hosts[self.rank]


@dataclass(frozen=True)
class HostRegistry:
    """The identities and roles of a job's hosts.

    Attributes:
        identities: Of every host.
        roles: By host: the roles that live there, each with its rank.
    """

    identities: Sequence[HostIdentity]
    roles: Mapping[int, Mapping[str, int]]
    run_directory: Path | None


def build_root_cause_error(
    found: Sequence[WorkerFailure | HostDeath], hosts: HostRegistry
) -> WorkerError:
    """Build the error that reports the root cause. A death counts before an exception, because a
    dying rank makes its peers raise, and a lost node before a single death; of several, the
    earliest call's or the earliest in time is the cause."""
    deaths = sorted(
        (item for item in found if isinstance(item, HostDeath)), key=lambda death: death.call.number
    )
    if lost := next((death for death in deaths if death.with_node), None):
        return _build_lost_node_error(lost, hosts)
    if deaths:
        return _build_host_death_error(deaths[0], hosts)
    cause = min(
        (item for item in found if isinstance(item, WorkerFailure)), key=lambda item: item.time
    )
    said = f"{cause.role}.{cause.method} failed on rank {cause.rank}: {cause.message}"
    return WorkerError(f"{said}\n\n{cause.traceback}".rstrip())


def _build_lost_node_error(death: HostDeath, hosts: HostRegistry) -> LostError:
    """Build the error for a node that no longer responds."""
    node = hosts.identities[death.host].node
    there = [host for host, identity in enumerate(hosts.identities) if identity.node == node]
    ranks: dict[str, list[int]] = {}
    for host in there:
        for role, rank in hosts.roles.get(host, {}).items():
            ranks.setdefault(role, []).append(rank)
    lived = ", ".join(f"{role} {format_ranks(numbers)}" for role, numbers in ranks.items())
    left = len(hosts.identities) - len(there)
    without = f", or go on without it (num_devices={left})," if left else ""
    return LostError(
        f"Node {hosts.identities[death.host].address} ({lived}) was lost during {death.call.name}: "
        "its machine or its Ray process ended, or the network does not reach it; bring it back "
        f"(`ray status` shows it){without} and start the job again."
    )


def _build_host_death_error(death: HostDeath, hosts: HostRegistry) -> LostError:
    role, rank, call = death.call.role, death.rank, death.call.name
    sentence = f"{role} rank {rank} ({hosts.identities[death.host]}) died during {call}."
    memory = format_out_of_memory(death.text)
    if_again = memory and (
        f"Memory ran out in {call} the time before, too: it needs more than there is, "
        "and to go on would not help."
    )
    sentence += memory or (
        " A process that ends without a traceback was killed from outside (kill -9, the kernel's"
        " out-of-memory killer) or crashed in native code."
    )
    if hosts.run_directory is None or role not in hosts.roles.get(death.host, {}):
        return LostError(sentence, if_again)
    log = hosts.run_directory / "logs" / f"{role}-{rank}.log"
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:] if log.exists() else []
    tail = "\n".join(f"  {line}" for line in lines) or "  (empty)"
    return LostError(f"{sentence}\nThe last lines of {log}:\n{tail}", if_again)


def format_ranks(numbers: Iterable[int]) -> str:
    """Return these ranks in words: `rank 1`, or `ranks 0 2`."""
    found = sorted(numbers)
    return f"rank{'s' if len(found) > 1 else ''} {' '.join(map(str, found))}"


def format_out_of_memory(text: str) -> str:
    """Return a sentence on how Ray's memory monitor ended a process and which processes use the
    most memory; empty if it did not."""
    if not (used := re.search(r"low on memory.*?was (\S+ used / \S+ limit)", text, re.DOTALL)):
        return ""
    said = used[1].replace("GB", " GiB")  # which Ray counts and calls so
    users = re.findall(r"^(\d+)\t([\d.]+)\t(.*)$", text, re.MULTILINE)
    largest = "".join(f"\n  {size:>6} GiB  process {pid}: {name}" for pid, size, name in users[:3])
    return f" Ray's memory monitor ended it: the machine was running out of memory ({said})." + (
        f" The largest processes:{largest}" if largest else ""
    )
