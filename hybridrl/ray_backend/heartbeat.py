"""Watch: what is heard of the hosts while calls are under way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

from hybridrl.controller.group_call import GroupCall
from hybridrl.controller.host_health import HostSnapshot, HostStatus
from hybridrl.ray_backend.ray_host import PRELOAD_METHOD
from hybridrl.ray_backend.ray_import import ray

ANSWER_TIMEOUT_SECONDS = 1.0
"""The time that a poll waits for answers; later ones are collected at the next poll."""
CLOCK_SAMPLES = 5
"""The number of questions about a host's clock; the quickest answer is the most accurate."""
SNAPSHOT_TIMEOUT_SECONDS = 5.0


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
