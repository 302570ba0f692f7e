"""Calls that do not end: which rank keeps the others waiting, in a sentence.

The ranks that hang are many, the cause is one: in a collective operation all wait for the rank that
has not entered it. That rank says nothing of it. So it is found by what the others say, by what it
does instead, or by its silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybridrl.controller.failures import HostIdentity, HostRegistry, format_ranks
from hybridrl.controller.group_call import GroupCall
from hybridrl.controller.host_health import HostSnapshot
from hybridrl.errors import CallTimeoutError
from hybridrl.system import collective_waits as waits
from hybridrl.system.formatting import format_seconds

PendingCalls = Mapping[int, tuple[GroupCall, int]]
"""The first pending call of each host, and the host's rank in it."""


@dataclass(frozen=True)
class HangReport:
    """A report on calls that have exceeded the deadline.

    Attributes:
        late: The hosts that have worked for longer than `limit` seconds.
        snapshots: Of every host; None: it did not answer.
        why: What is known besides.
    """

    pending: PendingCalls
    late: Sequence[int]
    limit: float
    snapshots: Sequence[HostSnapshot | None]
    hosts: HostRegistry
    why: str = ""

    def missing(self) -> list[int]:
        """Return the hosts that the others wait for, as far as this can be determined."""
        silent = [host for host in self.pending if self.snapshots[host] is None]
        late = [host for host in self.late if self._does_something_else(host)]
        # They may all wait for their GPUs, and these for the one that has been given less to do.
        behind_on_gpu = [host for host in self._behind(on_gpu=True) if host in late]
        if found := silent + (behind_on_gpu or late):
            return sorted(found)
        behind = self._behind()
        idle = [host for host in behind if not self._waits(host)]
        # Of messages from rank to rank nobody counts how many there were.
        busy = [host for host in self.pending if self._does_something_else(host)]
        # What hosts wait for may lie on one that has no call itself.
        apart = [host for host, snapshot in enumerate(self.snapshots) if snapshot is None]
        return idle or busy or behind or apart

    def error(self) -> CallTimeoutError:
        """Build the error, and write the stacks of every host to a file of the run; without a run
        folder they are part of the message."""
        missing = [host for host in self.missing() if host in self.pending]
        if_again = (
            f"{self._calls(missing or self.late)} hung the time before, too: to go on would not "
            "help."
        )
        said = " ".join(
            (
                f"{self._calls(self.late)} did not finish within {self.limit:g} s "
                f"(controller.timeout_s){self.why}.",
                *self._causes(),
                "If the work is only slow, raise that setting.",
            )
        )
        stacks = "\n".join(map(self._stack, range(len(self.snapshots))))
        folder = self.hosts.run_directory
        if folder is None:
            return CallTimeoutError(f"{said} The stacks of every host:\n\n{stacks}", if_again)
        step = 1 + min(self.pending[host][0].step for host in self.late)
        file = folder / f"stacks-{step:06d}.txt"
        try:
            file.write_text(f"{said}\n\n{stacks}\n", encoding="utf-8")
        except OSError as error:
            said += f" ({file}: {error.strerror}) The stacks:\n\n{stacks}"
            return CallTimeoutError(said, if_again)
        return CallTimeoutError(f"{said} The stacks of every host are in {file}.", if_again)

    def _calls(self, hosts: Iterable[int]) -> str:
        ranks: dict[str, list[int]] = {}
        for host in hosts:
            call, rank = self.pending[host]
            ranks.setdefault(call.name, []).append(rank)
        return ", ".join(f"{name} on {format_ranks(found)}" for name, found in ranks.items())

    def _causes(self) -> Iterator[str]:
        """Yield sentences on the missing ranks and on the ranks that wait."""
        missing = self.missing()
        if missing:
            what = "The rank that is missing" if len(missing) == 1 else "The ranks that are missing"
            named = "; ".join(f"{self._name(host)}, which {self._does(host)}" for host in missing)
            yield f"{what}: {named}."
        if waiting := self._waiting("for it " if len(missing) == 1 else ""):
            yield waiting
            if not missing:
                yield "All of them are in it: look at the network between their nodes."

    def _name(self, host: int) -> str:
        snapshot = self.snapshots[host]
        if host in self.pending:
            call, rank = self.pending[host]
            who = f"{call.role} rank {rank}"
        elif snapshot is not None and snapshot.status.method:
            who = f"{snapshot.status.role} rank {snapshot.status.rank}"
        else:
            lived = self.hosts.roles.get(host, {}).items()
            who = ", ".join(f"{role} rank {rank}" for role, rank in lived) or f"host {host}"
        return f"{who} ({self.hosts.identities[host]})"

    def _does(self, host: int) -> str:
        """Describe what a missing rank does instead of joining the operation that the others wait
        in."""
        if (snapshot := self.snapshots[host]) is None:
            pid = self.hosts.identities[host].pid
            return (
                "does not answer: it was stopped, or is blocked in native code (`py-spy dump "
                f"--native --pid {pid}` shows where)"
            )
        status = snapshot.status
        if not status.method:
            return "has no call in hand: it has left this one without entering what they wait in"
        if status.waiting:
            return f"waits for the inputs of {status.role}.{status.method}"
        if snapshot.communicates:
            return f"waits for other ranks itself, in {_format_operation(snapshot)}"
        return f"is in {snapshot.place}{_format_phase(snapshot)}"

    def _waiting(self, for_whom: str) -> str:
        """Describe which ranks wait for others, in which operation and for how long."""
        missing = self.missing()
        groups: dict[tuple[str, str], list[tuple[int, float | None]]] = {}
        for host, (call, rank) in self.pending.items():
            snapshot = self.snapshots[host]
            if host in missing or snapshot is None or not self._waits(host):
                continue
            group = call.role, f"{_format_operation(snapshot)}{_format_phase(snapshot)}"
            waited = None if snapshot.waiting is None else snapshot.waiting.seconds
            groups.setdefault(group, []).append((rank, waited))
        parts = []
        for (role, what), found in groups.items():
            seconds = [waited for _, waited in found if waited is not None]
            since = f", for {format_seconds(max(seconds))}" if seconds else ""
            verb = "waits" if len(found) == 1 else "wait"
            ranks = format_ranks(rank for rank, _ in found)
            parts.append(f"{role} {ranks} {verb} {for_whom}in {what}{since}")
        return f"{'; '.join(parts)}." if parts else ""

    def _stack(self, host: int) -> str:
        snapshot = self.snapshots[host]
        head = f"--- host {host} ({self.hosts.identities[host]}) ---\n"
        return head + ("did not answer" if snapshot is None else snapshot.stacks)

    def _waits(self, host: int) -> bool:
        """Return whether a host is known to wait for other ranks."""
        snapshot = self.snapshots[host]
        return snapshot is not None and snapshot.communicates

    def _does_something_else(self, host: int) -> bool:
        snapshot = self.snapshots[host]
        return snapshot is not None and snapshot.status.is_working and not snapshot.communicates

    def _behind(self, on_gpu: bool = False) -> list[int]:
        """Return the hosts that have not begun an operation that others wait in, or have queued on
        a GPU."""
        found = [snapshot for snapshot in self.snapshots if snapshot is not None]
        wanted: dict[str, int] = {}
        for snapshot in found:
            numbers = {
                n: count for n, count in snapshot.begun.items() if n.startswith(waits._GPU_BACKEND)
            }
            if not on_gpu:
                waiting = snapshot.waiting
                numbers = {} if waiting is None else {waiting.group: waiting.number}
            for group, number in numbers.items():
                wanted[group] = max(wanted.get(group, 0), number)
        return [
            host
            for host, snapshot in enumerate(self.snapshots)
            if snapshot is not None
            and any(number < wanted.get(group, 0) for group, number in snapshot.begun.items())
        ]


def format_silent_host(call: GroupCall, rank: int, identity: HostIdentity, seconds: float) -> str:
    """Format the notice of a host that does not answer although it has a call to run; it precedes
    the error."""
    return (
        f"{call.role} rank {rank} ({identity}) has not answered for {seconds:g} s "
        f"(controller.heartbeat_s), with {call.name} to do: it was stopped, is blocked in native "
        "code, or cannot be reached. The job goes on waiting, until controller.timeout_s."
    )


def _format_operation(snapshot: HostSnapshot) -> str:
    if (waiting := snapshot.waiting) is None:
        return snapshot.place
    if not waiting.group:
        return f"{waiting.operation} ({snapshot.place})"
    among = f" among ranks {' '.join(map(str, waiting.ranks))}" if waiting.ranks else ""
    return f"{waiting.operation} (number {waiting.number}{among})"


def _format_phase(snapshot: HostSnapshot) -> str:
    return f", phase {snapshot.status.phase}" if snapshot.status.phase else ""
