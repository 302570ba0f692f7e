"""Supervision: whether the cluster and the hosts of a job are well, while its driver waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from hybridrl.controller.failures import HostDeath, HostRegistry, build_root_cause_error
from hybridrl.controller.group_call import GroupCall, WorkerFailure
from hybridrl.controller.hang_report import HangReport, PendingCalls, format_silent_host
from hybridrl.errors import LostError
from hybridrl.ray_backend.cluster_nodes import RayNode
from hybridrl.ray_backend.connection import ClusterConnection, is_node_reachable
from hybridrl.ray_backend.heartbeat import HeartbeatMonitor

CLUSTER_POLL_SECONDS = 1.0
"""The interval between checks of the cluster's own processes, which take no time."""


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
        for host in range(len(self._hosts.identities)):
            if self._node(host) not in by_node:
                by_node |= {self._node(host): a for a in self._watch.clocks_ahead([host]).values()}
        hosts = range(len(self._hosts.identities))
        return {host: by_node[self._node(host)] for host in hosts if self._node(host) in by_node}

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
