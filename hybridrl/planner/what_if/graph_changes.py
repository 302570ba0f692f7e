"""What-if: a graph with other seconds, on other devices, with longer responses; to be replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hybridrl.batch.call_record import DRIVER_ROLE
from hybridrl.planner.step.graph_replay import NO_PLACE, WorkGraph, WorkNode
from hybridrl.planner.what_if.recorded_graph import OTHER_PHASE

OWN = "own"
"""In place of devices: as many as before, which nobody else has."""


@dataclass(frozen=True)
class NodeFilter:
    """A filter of nodes: those that match its role, phase and ranks.

    Attributes:
        role, phase: Empty: any.
        ranks: None: any.
    """

    role: str = ""
    phase: str = ""
    ranks: frozenset[int] | None = None

    def __call__(self, node: WorkNode) -> bool:
        return (
            self.role in ("", node.role)
            and self.phase in ("", node.phase)
            and (self.ranks is None or node.rank in self.ranks)
        )


def scale_speed(graph: WorkGraph, where: Callable[[WorkNode], bool], speed: float) -> WorkGraph:
    """Return the graph with some nodes `speed` times as fast, such as those of a repaired device or
    a wider link."""
    nodes = [
        node._replace(seconds=node.seconds / speed, wire=node.wire / speed) if where(node) else node
        for node in graph.nodes
    ]
    return replace(graph, nodes=nodes)


def scale_links(graph: WorkGraph, speed: float) -> WorkGraph:
    """Return the graph with all links `speed` times as fast: of each node, the seconds that it
    waits for them change."""
    nodes = [
        node._replace(seconds=node.seconds - node.wire * (1 - 1 / speed), wire=node.wire / speed)
        for node in graph.nodes
    ]
    return replace(graph, nodes=nodes)


def move_role(
    graph: WorkGraph,
    role: str,
    places: Sequence[int],
    planned: Mapping[str, float] | None = None,
) -> WorkGraph:
    """Return the graph with a role on other devices.

    Args:
        places: In rank order; new numbers are new devices.
        planned: By phase, how many times as long it takes, where that is known better.
    """
    names = list(graph.places)
    for place in places:
        names += [f"device {number}" for number in range(len(names), place + 1)]
    before = {node.rank for node in graph.nodes if node.role == role and node.place >= 0}
    share = len(before) / len(places)
    numbers: dict[int, list[int]] = {}  # of each node of before, those that stand for it
    joined: dict[tuple[int, ...], int] = {}  # by what was waited for
    nodes: list[WorkNode] = []
    for number, node in enumerate(graph.nodes):
        after = tuple(new for old in node.after for new in numbers[old])
        if len(after) > len(node.after) and not node.segment:
            # Thousands that each wait for thousands all wait for one node that does.
            if node.after not in joined:
                joined[node.after] = len(nodes)
                nodes.append(WorkNode(DRIVER_ROLE, OTHER_PHASE, 0, 0, 0.0, after=after))
            after = (joined[node.after],)
        if node.role != role or node.place < 0:
            numbers[number] = [len(nodes)]
            nodes.append(node._replace(after=after))
            continue
        ranks = [r for r in range(len(places)) if r % len(before) == node.rank]
        if not ranks:  # whoever waited for it waits for what it waited for
            numbers[number] = list(after)
            continue
        # A later part of a call goes on where the same rank was.
        afters = [(one,) for one in after] if node.segment else [after] * len(ranks)
        seconds = node.seconds * (planned or {}).get(node.phase, share)
        tokens = round(node.tokens * share)
        numbers[number] = list(range(len(nodes), len(nodes) + len(ranks)))
        nodes += [
            node._replace(rank=rank, place=places[rank], seconds=seconds, after=own, tokens=tokens)
            for rank, own in zip(ranks, afters, strict=True)
        ]
    return WorkGraph(nodes, names)


def overlap_scoring(graph: WorkGraph, role: str, parts: int) -> WorkGraph:
    """Return the graph with samples scored in this many equal parts, each as it leaves the
    generator, not all once the last is made.

    Args:
        role: Whose scoring keeps no device from generating, such as reward functions.
    """
    nodes: list[WorkNode] = []
    generating: list[float] = []  # seconds of the generation that each node comes right after
    for node in graph.nodes:
        before = max((generating[number] for number in node.after), default=0.0)
        if node.role == role and node.phase == "score":
            hidden = min(node.seconds, before) * (1 - 1 / parts)
            node = node._replace(seconds=node.seconds - hidden)
            before -= hidden
        elif node.phase == "generate":
            before = node.seconds
        elif node.phase != OTHER_PHASE:
            before = 0.0
        nodes.append(node)
        generating.append(before)
    return replace(graph, nodes=nodes)


def scale_responses(graph: WorkGraph, times: float, share: float = 0.5) -> WorkGraph:
    """Return the graph with responses `times` times as long.

    Args:
        share: Of the tokens of samples, those of responses as they were; what trains and scores
            works on all tokens, what generates makes responses.
    """
    parts = {"generate": 1.0, "score": share, "train": share}

    def longer(node: WorkNode) -> WorkNode:
        part = parts.get(node.phase, 0.0)
        return node._replace(seconds=node.seconds * (1 - part + part * times))

    return replace(graph, nodes=[longer(node) for node in graph.nodes])


def find_slowest_rank(graph: WorkGraph) -> tuple[NodeFilter, float] | None:
    """Find the rank that most others wait for, and how many times as fast it would be at the median
    of its peers; None if ranks are alike."""
    taken: dict[tuple[str, int], float] = {}
    for node in graph.nodes:
        if node.together != NO_PLACE:
            key = node.role, node.rank
            taken[key] = taken.get(key, 0.0) + node.seconds
    worst: tuple[NodeFilter, float] | None = None
    for (role, rank), seconds in taken.items():
        peers = sorted(s for (other, _), s in taken.items() if other == role)
        middle = peers[(len(peers) - 1) // 2]
        if middle and seconds / middle > (worst[1] if worst else 1.0):
            worst = NodeFilter(role, ranks=frozenset([rank])), seconds / middle
    return worst
