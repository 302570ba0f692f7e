"""Supervision: whether the cluster and the hosts of a job are well, while its driver waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from hybridrl.controller.failures import HostDeath, HostRegistry, build_root_cause_error
from hybridrl.controller.group_call import GroupCall, WorkerFailure
from hybridrl.controller.hang_report import HangReport, PendingCalls, format_silent_host
from hybridrl.controller.host_health import HostSnapshot, HostStatus
from hybridrl.errors import LostError
from hybridrl.ray_backend.cluster_nodes import RayNode
from hybridrl.ray_backend.connection import ClusterConnection, is_node_reachable
from hybridrl.ray_backend.ray_host import PRELOAD_METHOD
from hybridrl.ray_backend.ray_import import ray

CLUSTER_POLL_SECONDS = 1.0
"""The interval between checks of the cluster's own processes, which take no time."""
ANSWER_TIMEOUT_SECONDS = 1.0
"""The time that a poll waits for answers; later ones are collected at the next poll."""
CLOCK_SAMPLES = 5
"""The number of questions about a host's clock; the quickest answer is the most accurate."""
SNAPSHOT_TIMEOUT_SECONDS = 5.0


class HostSupervisor:
    """A supervisor of the hosts of one job.

    Args:
        actors: The hosts.
        hosts: What is known of them, by their numbers.
        nodes: All nodes of the cluster, by Ray's names for them.
        timeout_s: Longest time a call may run, or nobody may work.
        heartbeat_s: A host that does not answer for so long while it has a call is named.
        oldest: Gives the first call on a host that is not done there, and which rank it is.
        notify: Told, in a sentence, what the user should know.

    Attributes:
        patience: Seconds between two looks at the hosts.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        hosts: HostRegistry,
        nodes: Mapping[str, RayNode],
        connection: ClusterConnection,
        *,
        timeout_s: float,
        heartbeat_s: float,
        oldest: Callable[[int], tuple[GroupCall, int] | None],
        notify: Callable[[str], None],
    ) -> None:
        self._hosts, self._nodes, self._connection = hosts, nodes, connection
        self._numbers = range(len(actors))
        self._timeout, self._heartbeat = timeout_s, heartbeat_s
        self._oldest, self._notify = oldest, notify
        self._watch = HeartbeatMonitor(actors)
        self.patience = min(5.0, timeout_s / 4, heartbeat_s)
        self._looked = self._asked = time.monotonic()
        self._unreachable: set[str] = set()
        self._stalled = time.monotonic()  # since when no host has been seen to work
        self._told_of_fault = self._told_of_stop = False

    def work_begins(self) -> None:
        """Reset the stall timer, because nothing was pending before, so no host could be
        working."""
        self._stalled = time.monotonic()

    def check(self) -> None:
        """Check the cluster and the hosts if their intervals have passed.

        Raises:
            LostError: if a part of Ray has ended, once, for hosts may still work and save what they
                have; if a host has been working on one call for longer than the deadline; if nobody
                has been working for as long while calls are pending; or if nothing was heard of a
                node twice in a row.
        """
        now = time.monotonic()
        if now - self._looked > CLUSTER_POLL_SECONDS:
            self._looked = now
            self._check_cluster()
        if now - self._asked > self.patience:
            self._check_hosts()
            self._asked = time.monotonic()

    def lost(self, hosts: Iterable[int] | None = None) -> list[HostDeath]:
        """Return the deaths of those of these hosts, or of all, whose nodes cannot be reached and
        which have a pending call."""
        if len(self._nodes) < 2:
            return []
        looked = list(self._numbers if hosts is None else hosts)
        ids = list({self._node(host) for host in looked})
        with ThreadPoolExecutor(16) as pool:
            reached = pool.map(is_node_reachable, [self._nodes[node] for node in ids])
            lost = {node for node, there in zip(ids, reached, strict=True) if not there}
        gone = [host for host in looked if self._node(host) in lost]
        return [HostDeath(*oldest, "", with_node=True) for h in gone if (oldest := self._oldest(h))]

    def by_one_clock(
        self, found: Sequence[WorkerFailure | HostDeath]
    ) -> list[WorkerFailure | HostDeath]:
        """Return the failures with their times by this process's clock, as far as hosts answer. The
        first failure is taken for the cause, and the clocks of nodes may differ."""
        failures = [item for item in found if isinstance(item, WorkerFailure)]
        if len(failures) < 2 or len(self._nodes) < 2:
            return list(found)
        places = {
            (role, rank): host
            for host, roles in self._hosts.roles.items()
            for role, rank in roles.items()
        }
        at = {failure: places.get((failure.role, failure.rank), 0) for failure in failures}
        ahead = self._watch.clocks_ahead(set(at.values()))
        return [
            replace(item, time=item.time - ahead.get(at[item], 0.0))
            if isinstance(item, WorkerFailure)
            else item
            for item in found
        ]

    def clocks_ahead(self) -> dict[int, float]:
        """Return the clock offset of every host, as measured by the first host of its node that
        answers; empty on one node, where all have the driver's clock."""
        if len(self._nodes) < 2:
            return {}
        by_node: dict[str, float] = {}
        for host in self._numbers:
            if self._node(host) not in by_node:
                for ahead in self._watch.clocks_ahead([host]).values():
                    by_node[self._node(host)] = ahead
        at = {host: self._node(host) for host in self._numbers}
        return {host: by_node[node] for host, node in at.items() if node in by_node}

    def _node(self, host: int) -> str:
        return self._hosts.identities[host].node

    def _check_cluster(self) -> None:
        if (fault := self._connection.fault()) and not self._told_of_fault:
            self._told_of_fault = True
            raise LostError(fault)
        if not self._told_of_stop and (stopped := self._connection.stopped()):
            self._told_of_stop = True
            self._notify(
                f"{stopped}. The job goes on as far as it can, until controller.timeout_s "
                f"({self._timeout:g} s) is over."
            )

    def _check_hosts(self) -> None:
        silent = self._watch.look()
        lost = self.lost(silent)
        if again := [death for death in lost if self._node(death.host) in self._unreachable]:
            raise build_root_cause_error(again, self._hosts)
        self._unreachable = {self._node(death.host) for death in lost}
        pending = {host: oldest for host in self._numbers if (oldest := self._oldest(host))}
        self._tell_of_silence(pending)
        watch, statuses = self._watch, self._watch.statuses
        late = [
            host for host in pending if watch.seconds_on(host, pending[host][0]) > self._timeout
        ]
        why = ""
        may_work = any(host in pending for host in silent)
        if may_work or not pending or any(s is not None and s.is_working for s in statuses):
            self._stalled = time.monotonic()
        elif time.monotonic() - self._stalled > self._timeout:
            late = list(pending)
            why = ": no host is working, so what they wait for, or their replies, must be lost"
            if stopped := self._connection.stopped():
                why = f": {stopped}, and hosts wait for it"
        if late:
            raise HangReport(
                pending, late, self._timeout, watch.snapshots(), self._hosts, why
            ).error()

    def _tell_of_silence(self, pending: PendingCalls) -> None:
        """Notify the user, once, of a host that does not answer, long before the deadline."""
        for host in self._watch.fallen_silent(self._heartbeat):
            if host in pending:
                call, rank = pending[host]
                identity = self._hosts.identities[host]
                self._notify(format_silent_host(call, rank, identity, self._heartbeat))


class HeartbeatMonitor:
    """A monitor that asks every host, on a thread that does no work, what it is doing.

    Args:
        hosts: The actors.

    Attributes:
        statuses: What each host has said last; None: nothing, for now.
    """

    def __init__(self, hosts: Sequence[Any]) -> None:
        self._hosts = hosts
        self._questions: dict[int, Any] = {}  # by host, those that are not answered
        self._asked = [0.0] * len(hosts)
        self._heard = [0.0] * len(hosts)
        self._given: set[int] = set()
        self.statuses: list[HostStatus | None] = [None] * len(hosts)

    def look(self) -> list[int]:
        """Poll all hosts that owe no answer, and return the hosts that are silent now."""
        self._take(0.0)
        now = time.monotonic()
        for host, actor in enumerate(self._hosts):
            if host not in self._questions:
                self._questions[host], self._asked[host] = actor.status.remote(), now
        self._take(ANSWER_TIMEOUT_SECONDS)
        return list(self._questions)

    def fallen_silent(self, seconds: float) -> list[int]:
        """Return the hosts that have not answered for this many seconds, each once."""
        now = time.monotonic()
        found = {host for host in self._questions if now - self._asked[host] > seconds}
        new = found - self._given
        self._given = found
        return sorted(new)

    def seconds_on(self, host: int, call: GroupCall) -> float:
        """Return how long a host has worked on its first pending call, without the time that it
        waited for inputs. A silent host is assumed to be doing what it last reported."""
        status = self.statuses[host]
        worked = 0.0
        if status is not None and status.is_working and status.method != PRELOAD_METHOD:
            worked = status.seconds
        if host not in self._questions:
            return worked
        same = status is not None and (status.role, status.method) == (call.role, call.method)
        begin = self._heard[host] - (worked if same else 0.0)
        return time.monotonic() - max(call.since, begin)

    def snapshots(self) -> list[HostSnapshot | None]:
        """Return a snapshot of every host; None for hosts that do not answer."""
        asked = [host.snapshot.remote() for host in self._hosts]
        found = _gather_answers(asked, SNAPSHOT_TIMEOUT_SECONDS)
        return [found.get(reference) for reference in asked]

    def clocks_ahead(self, hosts: Iterable[int]) -> dict[int, float]:
        """Return by host how many seconds its node's clock is ahead of this one's, as the quickest
        of a few answers says. Hosts that do not answer are left out."""
        found = {}
        for host in hosts:
            answers = []
            for _ in range(CLOCK_SAMPLES):
                before = time.time()
                answer = _gather_answers([self._hosts[host].clock.remote()], ANSWER_TIMEOUT_SECONDS)
                if not answer:
                    break
                (there,), after = answer.values(), time.time()
                answers.append((after - before, there - (before + after) / 2))
            if answers:
                found[host] = min(answers)[1]
        return found

    def _take(self, seconds: float) -> None:
        found = _gather_answers(list(self._questions.values()), seconds)
        for host, question in list(self._questions.items()):
            if question in found:
                self.statuses[host], self._heard[host] = found[question], time.monotonic()
                del self._questions[host]


def _gather_answers(references: list[Any], seconds: float) -> dict[Any, Any]:
    """Return the answers that come within this many seconds."""
    if not references:
        return {}
    ready, _ = ray.wait(references, num_returns=len(references), timeout=seconds)
    found: dict[Any, Any] = {}
    for reference in ready:
        with contextlib.suppress(ray.exceptions.RayError):  # it died: others notice that, too
            found[reference] = ray.get(reference)
    return found
