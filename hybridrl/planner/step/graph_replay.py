"""Replay: when each part of a piece of work begins and ends, given what each takes and waits for.

The one simulator of the library. In goes a graph of nodes, each with its seconds and the device
that it occupies; out come the times of each, the critical path, and why devices were idle. Both are
plain data. A device does its nodes in the order in which they are listed, as hosts work through
calls in the order in which the driver makes them.

After dPRO (Hu et al., MLSys 2022): a topological order with a queue for each device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

from hybridrl.errors import DataError

NO_PLACE = -1
"""The place of what occupies nothing, such as the driver's own work."""
_WAITING_FOR_PEERS, NOTHING_TO_DO = "its peers", "nothing to do"
"""Why a device is idle, besides what it waits for."""


class WorkNode(NamedTuple):
    """A piece of work that occupies one device for some time.

    Attributes:
        role, phase: What it is about; `role.phase` is its name to people.
        segment: Its number within a call.
        rank: Of the role.
        seconds: That it takes, but for waiting.
        place: The number of the device that it occupies; `NO_PLACE`: none.
        after: The nodes that have to end first.
        lag: Seconds until it begins once it could, after these and on a device that is free: those
            of the driver, and of bringing its inputs.
        together: Nodes of the same number, not `NO_PLACE`, end together, when the last of them has
            done its part: the ranks of a collective. Until then they keep their devices.
        tokens: That it works on; 0: nobody has said.
        wire: Of its seconds, those in which it waits for a link.
    """

    role: str
    phase: str
    segment: int
    rank: int
    seconds: float
    place: int = NO_PLACE
    after: tuple[int, ...] = ()
    lag: float = 0.0
    together: int = NO_PLACE
    tokens: int = 0
    wire: float = 0.0

    @property
    def name(self) -> str:
        """Return `role.phase`, as people see it."""
        return f"{self.role}.{self.phase}"


@dataclass(frozen=True)
class WorkGraph:
    """A graph of work to replay.

    Attributes:
        nodes: A device does them in this order.
        places: Names of devices, by their numbers.
    """

    nodes: Sequence[WorkNode]
    places: Sequence[str]


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay. Times are in seconds from its beginning.

    Attributes:
        starts: Of each node.
        own_ends: When each has done its part.
        ends: When each has ended, with those that it ends together with.
        because: For each node what it had to wait for last: a node that it comes after, or one that
            had its place before; `NO_PLACE`: nothing.
        slowest: By number of `together`, the node whose part was done last.
    """

    graph: WorkGraph
    starts: Sequence[float]
    own_ends: Sequence[float]
    ends: Sequence[float]
    because: Sequence[int]
    slowest: Mapping[int, int]

    @cached_property
    def makespan(self) -> float:
        """Return the time at which the last node ends."""
        return max(self.ends, default=0.0)

    @cached_property
    def critical(self) -> list[int]:
        """Return the critical path: nodes that each had to wait for the one before, up to the one
        that ends last."""
        path: list[int] = []
        node = max(range(len(self.ends)), key=self.ends.__getitem__, default=NO_PLACE)
        while node != NO_PLACE:
            node = self._decisive(node)
            path.append(node)
            node = self.because[node]
        return path[::-1]

    def _decisive(self, node: int) -> int:
        """Return the node that determined when this one ended: itself, or a slower peer."""
        return self.slowest.get(self.graph.nodes[node].together, node)

    @cached_property
    def idle(self) -> dict[int, dict[str, float]]:
        """Return the idle seconds of each device by cause: `role.phase`, `its peers` in the same
        collective, `a lag`, or `nothing to do` once its last node has ended."""
        found: dict[int, dict[str, float]] = {
            place: defaultdict(float) for place in range(len(self.graph.places))
        }
        until = dict.fromkeys(found, 0.0)
        for number, node in enumerate(self.graph.nodes):
            if node.place < 0:
                continue
            causes = found[node.place]
            self._explain(number, until[node.place], causes)
            if (waits := self.ends[number] - self.own_ends[number]) > 0:
                causes[_WAITING_FOR_PEERS] += waits
            until[node.place] = self.ends[number]
        for place, end in until.items():
            if end < self.makespan:
                found[place][NOTHING_TO_DO] += self.makespan - end
        return {place: dict(causes) for place, causes in found.items()}

    def _explain(self, node: int, since: float, causes: dict[str, float]) -> None:
        """Add up, going backwards, what happened from a moment on until a node began."""
        at = self.starts[node]
        lag = self.graph.nodes[node].lag
        while at > since:
            before = self.because[node]
            begins = since if before == NO_PLACE else max(since, self.ends[before])
            if at > begins:
                causes["a lag" if lag else NOTHING_TO_DO] += at - begins
            at = begins
            if before == NO_PLACE or at <= since:
                break
            node = self._decisive(before)
            begins = max(since, self.starts[node])
            causes[self.graph.nodes[node].name] += at - begins
            at, lag = begins, self.graph.nodes[node].lag

    @property
    def idle_shares(self) -> dict[int, float]:
        """Return the share of the makespan that each device is idle."""
        whole = self.makespan or 1.0
        return {place: sum(causes.values()) / whole for place, causes in self.idle.items()}


def replay_graph(graph: WorkGraph) -> ReplayResult:
    """Simulate a graph, event by event.

    Raises:
        DataError: if nodes wait for each other in a circle.
    """
    nodes = graph.nodes
    count = len(nodes)
    starts, own_ends, ends = [-1.0] * count, [0.0] * count, [0.0] * count
    ready, because, missing = [0.0] * count, [NO_PLACE] * count, [0] * count
    followers: list[list[int]] = [[] for _ in range(count)]
    queues: list[list[int]] = [[] for _ in graph.places]
    peers: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        missing[number] = len(node.after)
        for before in node.after:
            followers[before].append(number)
        if node.place >= 0:
            queues[node.place].append(number)
        if node.together >= 0:
            peers.setdefault(node.together, []).append(number)
    for queue in queues:
        queue.reverse()  # so that the next node is the last one
    left = {together: len(members) for together, members in peers.items()}
    slowest: dict[int, int] = {}
    free, last = [0.0] * len(queues), [NO_PLACE] * len(queues)
    busy = [False] * len(queues)
    running: list[tuple[float, int]] = []  # when each node has done its part
    done = 0

    def begin(number: int) -> None:
        """Start a node whose predecessors have all ended, if it is its turn on its device."""
        node, start = nodes[number], ready[number]
        if node.place >= 0:
            if busy[node.place] or queues[node.place][-1] != number:
                return
            if free[node.place] > start:
                start, because[number] = free[node.place], last[node.place]
            busy[node.place] = True
        starts[number] = start = start + node.lag
        heappush(running, (start + node.seconds, number))

    for number in range(count):
        if not missing[number]:
            begin(number)
    while running:
        now, number = heappop(running)
        own_ends[number] = now
        node = nodes[number]
        ended = [number]
        if node.together >= 0:
            left[node.together] -= 1
            if left[node.together]:
                continue
            slowest[node.together], ended = number, peers[node.together]
        done += len(ended)
        for one in ended:
            ends[one] = now
            place = nodes[one].place
            if place >= 0:
                queues[place].pop()
                free[place], last[place], busy[place] = now, one, False
            for follower in followers[one]:
                missing[follower] -= 1
                if now >= ready[follower]:
                    ready[follower], because[follower] = now, one
                if not missing[follower]:
                    begin(follower)
            if place >= 0 and queues[place] and not missing[queues[place][-1]]:
                begin(queues[place][-1])
    if done < count:
        stuck = next(number for number in range(count) if starts[number] < 0)
        raise DataError(
            f"Node {stuck}, `{nodes[stuck].name}`, can never begin: what it comes after, and what "
            "is listed before it on its device, waits for it."
        )
    return ReplayResult(graph, starts, own_ends, ends, because, slowest)
