"""Pipeline schedules: nothing starts before what it needs, nobody waits in a circle, the idle time
is the theory's and the activations held are bounded."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.parallel.pipeline_schedule import (
    ACTION_TICKS,
    ActionKind,
    PipelineAction,
    build_schedule,
    compute_end_ticks,
    list_computations,
)

SHAPES = st.tuples(st.integers(2, 6), st.integers(1, 3), st.integers(1, 14))
"""Ranks, chunks, micro-batches."""
PAIR = sum(ACTION_TICKS.values())
"""Ticks of one forward and one backward."""
FLOWS = {
    ActionKind.SEND_STATES: (ActionKind.RECEIVE_STATES, 1),
    ActionKind.SEND_GRADIENT: (ActionKind.RECEIVE_GRADIENT, -1),
}


def receive_of(send):
    """The action that takes the message of a send."""
    kind, step = FLOWS[send.kind]
    return PipelineAction(kind, send.stage + step, send.micro_batch)


def run_waiting_for_every_message(plan, stages):
    """Runs all ranks at once, in a world where a send ends only when its receive has begun. That
    is stricter than any transport. Checks that what a computation takes is there."""
    ranks = len(plan)
    done = [0] * ranks
    there = set()

    def head(rank):
        return plan[rank][done[rank]] if done[rank] < len(plan[rank]) else None

    def check(action):
        kind, stage, number = action
        if kind is ActionKind.FORWARD and stage:
            assert PipelineAction(ActionKind.RECEIVE_STATES, stage, number) in there
        if kind is ActionKind.BACKWARD:
            assert PipelineAction(ActionKind.FORWARD, stage, number) in there
            assert (
                stage == stages - 1
                or PipelineAction(ActionKind.RECEIVE_GRADIENT, stage, number) in there
            )
        if kind in FLOWS:
            made = ActionKind.FORWARD if kind is ActionKind.SEND_STATES else ActionKind.BACKWARD
            assert PipelineAction(made, stage, number) in there

    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            action = head(rank)
            if action is None:
                continue
            assert action.stage % ranks == rank
            if action.kind in ACTION_TICKS:
                check(action)
                there.add(action)
                done[rank] += 1
                moved = True
            elif action.kind in FLOWS:
                wanted = receive_of(action)
                peer = wanted.stage % ranks
                if head(peer) == wanted:
                    check(action)
                    there.add(wanted)
                    done[rank] += 1
                    done[peer] += 1
                    moved = True
    assert [head(rank) for rank in range(ranks)] == [None] * ranks
    return there


@given(SHAPES, st.booleans())
def test_no_rank_waits_in_a_circle_and_nothing_is_missing_where_it_is_needed(shape, training):
    ranks, chunks, micro_batches = shape
    plan = build_schedule(*shape, training=training)
    there = run_waiting_for_every_message(plan, ranks * chunks)
    kinds = list(ACTION_TICKS) if training else [ActionKind.FORWARD]
    everything = itertools.product(kinds, range(ranks * chunks), range(micro_batches))
    assert {action for action in there if action.kind in ACTION_TICKS} == {
        PipelineAction(*a) for a in everything
    }
    actions = [action for of_rank in plan for action in of_rank]
    assert len(actions) == len(set(actions))


@given(SHAPES)
def test_the_order_of_computations_stays_as_it_was_without_messages(shape):
    ranks, chunks, micro_batches = shape
    for rank, actions in enumerate(build_schedule(*shape, training=True)):
        alone = [action for action in actions if action.kind in ACTION_TICKS]
        assert alone == list_computations(rank, ranks, chunks, micro_batches, True)


@given(SHAPES)
def test_two_ranks_see_their_messages_in_one_order(shape):
    ranks = shape[0]
    plan = build_schedule(*shape, training=True)

    def messages(rank, peer):
        for action in plan[rank]:
            if action.kind in FLOWS:
                wanted = receive_of(action)
                if wanted.stage % ranks == peer:
                    yield rank, wanted
            elif action.kind not in ACTION_TICKS:
                step = -1 if action.kind is ActionKind.RECEIVE_STATES else 1
                if (action.stage + step) % ranks == peer:
                    yield peer, action

    for one, other in itertools.combinations(range(ranks), 2):
        assert list(messages(one, other)) == list(messages(other, one))


def makespan(ranks, chunks, micro_batches):
    orders = [list_computations(rank, ranks, chunks, micro_batches, True) for rank in range(ranks)]
    return max(compute_end_ticks(orders).values())


@given(SHAPES)
def test_idle_time_is_that_of_the_theory(shape):
    """In time of one chunk: (p - 1)(f + b) beyond the rank's own work; with fewer micro-batches
    than ranks, interleaving still has to fill every chunk of the ring."""
    ranks, chunks, micro_batches = shape
    work = max(chunks * micro_batches, (chunks - 1) * ranks + micro_batches)
    assert makespan(*shape) == (work + ranks - 1) * PAIR


def held(actions):
    """Most forwards without their backward, at any time."""
    alive = itertools.accumulate(
        {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1}.get(action.kind, 0) for action in actions
    )
    return max(alive)


@given(SHAPES)
def test_activations_are_bounded(shape):
    ranks, chunks, micro_batches = shape
    for rank, actions in enumerate(build_schedule(*shape, training=True)):
        if chunks == 1:
            assert held(actions) == min(micro_batches, ranks - rank)
        else:
            group = max(ranks, -(-micro_batches // max(1, micro_batches // ranks)))
            bound = (chunks - 1) * group + 2 * (ranks - 1 - rank) + 1
            assert held(actions) <= min(chunks * micro_batches, bound)


def test_the_first_rank_of_two_alternates_after_one_forward():
    names = [(a.kind.name[0], a.micro_batch) for a in list_computations(0, 2, 1, 3, True)]
    assert names == [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]


def test_interleaving_takes_chunks_in_groups_of_as_many_micro_batches_as_ranks():
    order = [(a.stage, a.micro_batch) for a in list_computations(0, 2, 2, 4, False)]
    assert order == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]


def test_a_circle_is_an_error():
    waits = [[PipelineAction(ActionKind.BACKWARD, 0, 0), PipelineAction(ActionKind.FORWARD, 0, 0)]]
    with pytest.raises(ValueError, match="circle after"):
        compute_end_ticks(waits)
