"""The replay of graphs, graphs of what was recorded, and what-ifs."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.batch.call_record import CallRecord, PhaseSpan
from hybridrl.errors import DataError
from hybridrl.planner.step.graph_replay import WorkGraph, WorkNode, replay_graph
from hybridrl.planner.what_if.graph_changes import (
    NodeFilter,
    find_slowest_rank,
    move_role,
    scale_responses,
    scale_speed,
)
from hybridrl.planner.what_if.recorded_graph import build_recorded_graph


def node(role, seconds, place=-1, after=(), **more):
    return WorkNode(
        role, more.pop("phase", "works"), 0, more.pop("rank", 0), seconds, place, after, **more
    )


def test_devices_work_in_order():
    in_order = [node("a", 5), node("b", 1, 0, (0,)), node("c", 1, 0)]
    assert replay_graph(WorkGraph(in_order, ["device 0"])).starts == [0, 5, 6]


def test_ranks_of_a_collective_end_together_and_keep_their_devices():
    nodes = [
        node("actor", 1, 0, rank=0, together=7),
        node("actor", 3, 1, rank=1, together=7),
        node("reward", 2, 0),
    ]
    found = replay_graph(WorkGraph(nodes, ["device 0", "device 1"]))
    assert found.ends == [3, 3, 5] and found.own_ends == [1, 3, 5]
    assert found.critical == [1, 2]  # the slow rank, not the one whose device it was
    assert found.idle == {0: {"its peers": 2}, 1: {"nothing to do": 2}}
    assert found.idle_shares == {0: 2 / 5, 1: 2 / 5}


def test_idle_time_is_explained_by_what_was_waited_for():
    nodes = [
        node("actor", 4, 0, phase="generate"),
        node("driver", 1, after=(0,), phase="thinks"),
        node("reward", 2, 1, (1,), lag=0.5),
        node("actor", 1, 0, (2,), phase="train"),
    ]
    found = replay_graph(WorkGraph(nodes, ["device 0", "device 1"]))
    assert found.makespan == 8.5
    assert found.idle[1] == {
        "actor.generate": 4,
        "driver.thinks": 1,
        "a lag": 0.5,
        "nothing to do": 1,
    }
    assert found.idle[0] == {"reward.works": 2, "a lag": 0.5, "driver.thinks": 1}
    assert found.critical == [0, 1, 2, 3]


def test_nodes_that_wait_for_each_other_are_named():
    with pytest.raises(DataError, match=r"`a\.works`, can never begin"):
        replay_graph(WorkGraph([node("a", 1, after=(1,)), node("b", 1, after=(0,))], []))
    with pytest.raises(DataError, match="can never begin"):  # listed before what it needs
        replay_graph(WorkGraph([node("a", 1, 0, (1,)), node("b", 1, 0)], ["device 0"]))


def test_nothing_takes_no_time():
    found = replay_graph(WorkGraph([], ["device 0"]))
    assert found.makespan == 0 and found.critical == [] and found.idle == {0: {}}


def slow_replay(graph):
    """The same by going over all nodes until nothing changes."""
    nodes, ends = graph.nodes, [0.0] * len(graph.nodes)
    for _ in nodes:
        own, free = [], {}
        for number, one in enumerate(nodes):
            ready = max([ends[before] for before in one.after], default=0.0)
            start = max(ready, free.get(one.place, 0.0) if one.place >= 0 else 0.0) + one.lag
            own.append(start + one.seconds)
            free[one.place] = ends[number]
        new = [
            max(own[m] for m, o in enumerate(nodes) if o.together == one.together)
            if one.together >= 0
            else own[number]
            for number, one in enumerate(nodes)
        ]
        if new == ends:
            return ends
        ends = new
    return ends


@given(st.integers(0, 10_000))
def test_any_graph_is_replayed_as_by_going_over_it_again_and_again(seed):
    dice = random.Random(seed)
    nodes, calls = [], []
    for call in range(dice.randint(1, 12)):
        devices = sorted(dice.sample(range(4), dice.randint(1, 4)))
        after = tuple(n for made in calls if dice.random() < 0.4 for n in made)
        together = call if dice.random() < 0.5 else -1
        calls.append(range(len(nodes), len(nodes) + len(devices)))
        for device in devices:
            seconds, lag = dice.randint(0, 5), dice.choice([0, 0, 2])
            nodes.append(node("r", seconds, device, after, lag=lag, together=together))
    graph = WorkGraph(nodes, list("abcd"))
    found = replay_graph(graph)
    assert found.ends == slow_replay(graph)
    length = sum(
        max(0, nodes[n].seconds + nodes[n].lag) for n in found.critical
    )  # what waits for what, without a gap
    assert length == found.makespan
    for place, causes in found.idle.items():
        busy = sum(one.seconds for one in nodes if one.place == place)
        assert sum(causes.values()) == pytest.approx(found.makespan - busy)


BEGIN = 1_700_000_000.0


def record(call, role, rank, host, start, end, spans=(), reads=(), waited=0.0):
    found = CallRecord(role, rank, "m", BEGIN + start, BEGIN + end)
    found.spans = [PhaseSpan(name, BEGIN + s, BEGIN + e, w) for name, s, e, w in spans]
    found.call, found.host, found.reads, found.waited = call, host, reads, waited
    return found


STEP = [
    record(1, "actor", 0, 0, 0.1, 3, [("sync", 0.1, 0.6, 0.0), ("generate", 0.6, 3, 0)]),
    record(1, "actor", 1, 1, 0.1, 2, [("sync", 0.1, 0.6, 0.3), ("generate", 0.6, 2, 0)], (), 0.3),
    record(2, "reward", 0, 2, 3.1, 4, [("score", 3.2, 4, 0)], (1,)),
    record(3, "reference", 0, 3, 3.1, 5, [("score", 3.1, 5, 0)], (1,)),
    record(4, "actor", 0, 0, 5.2, 8, [("train", 5.2, 8, 0.1)], (1, 2, 3), 0.1),
    record(4, "actor", 1, 1, 5.2, 8, [("train", 5.2, 8, 1.1)], (1, 2, 3), 1.1),
]


def test_what_was_recorded_is_replayed_as_it_was():
    graph = build_recorded_graph(STEP, BEGIN, BEGIN + 8.5)
    found = replay_graph(graph)
    assert found.makespan == pytest.approx(8.5)
    by_name = {(n.role, n.phase, n.rank): i for i, n in enumerate(graph.nodes)}
    assert found.starts[by_name["reward", "score", 0]] == pytest.approx(3.2)
    assert found.ends[by_name["actor", "train", 1]] == pytest.approx(8)
    assert graph.nodes[by_name["actor", "train", 1]].seconds == pytest.approx(1.8)  # not its wait
    names = [graph.nodes[n].name for n in found.critical]
    assert names[-3:] == ["reference.score", "actor.train", "driver.end"]
    assert find_slowest_rank(graph)[0] == NodeFilter("actor", ranks=frozenset([0]))


def test_a_graph_begins_and_ends_with_its_calls_if_nobody_says_when():
    """As docs/planning.md makes one."""
    assert replay_graph(build_recorded_graph(STEP)).makespan == pytest.approx(7.9)
    assert replay_graph(build_recorded_graph([])).makespan == 0


def test_hosts_whose_clocks_differ():
    ahead = {0: 0.5, 1: -0.25}
    shifted = []
    for one in STEP:
        by = ahead.get(one.host, 0.0)
        spans = [(s.phase, s.start + by - BEGIN, s.end + by - BEGIN, s.waited) for s in one.spans]
        start, end = one.start + by - BEGIN, one.end + by - BEGIN
        shifted.append(
            record(one.call, one.role, one.rank, one.host, start, end, spans, one.reads, one.waited)
        )
    found = replay_graph(build_recorded_graph(shifted, BEGIN, BEGIN + 8.5, ahead))
    assert found.ends == pytest.approx(
        replay_graph(build_recorded_graph(STEP, BEGIN, BEGIN + 8.5)).ends
    )


def test_what_if():
    graph = build_recorded_graph(STEP, BEGIN, BEGIN + 8.5)

    def step(changed):
        return replay_graph(changed).makespan

    assert step(graph) == pytest.approx(8.5)
    # On the critical path all of it is gained; off the path nothing.
    assert step(scale_speed(graph, NodeFilter("reference"), 2)) == pytest.approx(8.5 - 0.95)
    assert step(scale_speed(graph, NodeFilter("reward"), 2)) == pytest.approx(8.5)
    # The slow rank's 2.8 s of training, of which the other needs 1.8.
    mended = scale_speed(graph, NodeFilter("actor", "train", ranks=frozenset([0])), 2.8)
    assert step(mended) == pytest.approx(8.5 - 1.0)
    # Both scorers on one device take turns.
    assert step(move_role(graph, "reward", [3])) == pytest.approx(8.5 + 0.9, abs=0.15)
    longer = replay_graph(scale_responses(graph, 2, 0.5)).makespan
    assert longer == pytest.approx(8.5 + 2.4 + 0.95 + 1.4)


def test_a_role_on_more_or_fewer_devices():
    graph = build_recorded_graph(STEP, BEGIN, BEGIN + 8.5)
    assert replay_graph(move_role(graph, "reference", [3, 4])).makespan == pytest.approx(8.5 - 0.95)
    fewer = move_role(graph, "actor", [0])
    assert not any(one.place == 1 for one in fewer.nodes)
    (trains,) = [one for one in fewer.nodes if one.phase == "train"]
    assert trains.seconds == pytest.approx(2 * 2.8)
    assert replay_graph(fewer).makespan > 8.5


def test_what_is_quicker_takes_no_longer():
    graph = build_recorded_graph(STEP, BEGIN, BEGIN + 8.5)
    for role in ("actor", "reward", "reference", "driver"):
        assert replay_graph(scale_speed(graph, NodeFilter(role), 1.25)).makespan <= 8.5 + 1e-9
