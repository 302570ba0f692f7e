"""The order in which the ranks of a pipeline compute and communicate: 1F1B and interleaved 1F1B.

Pure: lists of actions, made from a few numbers. Stage s lies on rank s % ranks.

1F1B (Narayanan et al., arXiv:2006.09503): after a warm-up of forwards each rank alternates one
forward and one backward, so that rank r of p holds the activations of at most p - r micro-batches.
Interleaved 1F1B (Narayanan et al., arXiv:2104.04473, section 2.2) gives each rank several stages;
its idle time is shorter by that factor, for more messages and more activations held.
"""

from __future__ import annotations

import itertools
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from hybridrl.errors import ConfigError


def split_layers(layers: int, stages: int) -> list[range]:
    """Return consecutive layers for each stage, as evenly as possible.

    What does not divide goes to earlier stages: the last one also has the output head.
    """
    edges = [-(-layers * stage // stages) for stage in range(stages + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def check_stages(layers: int, ranks: int, chunks: int = 1, setting: str = "parallel.pp") -> None:
    """Check before anything starts that a model has enough layers for a pipeline.

    Args:
        layers: Decoder layers of the model.
        ranks: Size of the `pp` axis.
        chunks: Stages on each rank.
        setting: Name of the setting that gave `ranks`.

    Raises:
        ConfigError: naming the setting and the largest value that works.
    """
    if ranks * chunks > layers:
        most = max(1, layers // chunks)
        each = f", {chunks} on each rank," if chunks > 1 else ""
        raise ConfigError(
            f"{setting}={ranks} cuts the model into {ranks * chunks} stages{each} but it has only "
            f"{layers} layers, and every stage needs one. Choose {setting}={most} or less"
            f"{', or fewer chunks' if chunks > 1 else ''}."
        )


class ActionKind(Enum):
    """The kind of a pipeline action. States flow from stage s to s + 1, their gradients back."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND_STATES = "send states"
    RECEIVE_STATES = "receive states"
    SEND_GRADIENT = "send gradient"
    RECEIVE_GRADIENT = "receive gradient"


class PipelineAction(NamedTuple):
    """One action of a rank. `stage` is the rank's own; a message goes to its neighbour."""

    kind: ActionKind
    stage: int
    micro_batch: int


ACTION_TICKS = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2}
"""Time that computations are taken to need when messages are put in order."""


@lru_cache(maxsize=64)
def build_schedule(
    ranks: int, chunks: int, micro_batches: int, *, training: bool
) -> tuple[tuple[PipelineAction, ...], ...]:
    """Build the sequence of actions of every rank.

    Messages stand where they are due if computations take `ACTION_TICKS` and messages no time. That
    puts all actions of all ranks into one order in time, which every rank keeps to: even if each
    send waited for its receive, no rank could wait for another in a circle. Between any two ranks
    both see the same sequence of messages, so a transport without tags (NCCL) matches them.

    Args:
        ranks: Ranks of the pipeline, at least 2: a stage's neighbours lie on other ranks.
        chunks: Stages on each rank.
        micro_batches: Micro-batches, at least 1.
        training: With backwards; otherwise forwards only.
    """
    computed = [
        list_computations(rank, ranks, chunks, micro_batches, training) for rank in range(ranks)
    ]
    ends = compute_end_ticks(computed)
    timed: list[list[tuple[tuple[int, int, int], PipelineAction]]] = [
        [((ends[action] - ACTION_TICKS[action.kind], 1, 0), action) for action in actions]
        for actions in computed
    ]
    for action, end in ends.items():
        kind, stage, micro_batch = action
        there = stage + 1 if kind is ActionKind.FORWARD else stage - 1
        if not 0 <= there < ranks * chunks:
            continue
        # At one time, the messages of one rank's neighbours are told apart by their senders.
        key = (end, 0, stage)
        send, receive = (
            (ActionKind.SEND_STATES, ActionKind.RECEIVE_STATES)
            if kind is ActionKind.FORWARD
            else (ActionKind.SEND_GRADIENT, ActionKind.RECEIVE_GRADIENT)
        )
        timed[stage % ranks].append((key, PipelineAction(send, stage, micro_batch)))
        timed[there % ranks].append((key, PipelineAction(receive, there, micro_batch)))
    return tuple(
        tuple(action for _, action in sorted(actions, key=lambda each: each[0]))
        for actions in timed
    )


def list_computations(
    rank: int, ranks: int, chunks: int, micro_batches: int, training: bool
) -> list[PipelineAction]:
    """List the forwards and backwards of one rank, in order."""
    groups = _groups(ranks, micro_batches) if chunks > 1 else [range(micro_batches)]
    forwards = [
        PipelineAction(ActionKind.FORWARD, chunk * ranks + rank, micro_batch)
        for group in groups
        for chunk in range(chunks)
        for micro_batch in group
    ]
    if not training:
        return forwards
    backwards = [
        PipelineAction(ActionKind.BACKWARD, chunk * ranks + rank, micro_batch)
        for group in groups
        for chunk in reversed(range(chunks))
        for micro_batch in group
    ]
    after = ranks - 1 - rank  # ranks between here and the end
    warm_up = 2 * after + (chunks - 1) * len(groups[0]) if chunks > 1 else after
    ahead = min(warm_up, len(forwards))
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]


def compute_end_ticks(computed: list[list[PipelineAction]]) -> dict[PipelineAction, int]:
    """Compute the tick at which each computation ends if each starts as soon as it can.

    Raises:
        ValueError: if the orders wait for each other in a circle.
    """
    last = max(action.stage for actions in computed for action in actions)
    ends: dict[PipelineAction, int] = {}
    clocks = [0] * len(computed)
    done = [0] * len(computed)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(computed):
            while done[rank] < len(actions):
                action = actions[done[rank]]
                needed = _needs(action, last)
                if any(need not in ends for need in needed):
                    break
                start = max([clocks[rank], *(ends[need] for need in needed)])
                clocks[rank] = ends[action] = start + ACTION_TICKS[action.kind]
                done[rank] += 1
                moved = True
    if done != [len(actions) for actions in computed]:
        raise ValueError(f"The ranks wait for each other in a circle after {done} computations.")
    return ends


def _needs(action: PipelineAction, last: int) -> list[PipelineAction]:
    """Return the computations whose results `action` needs."""
    kind, stage, micro_batch = action
    if kind is ActionKind.FORWARD:
        return [PipelineAction(kind, stage - 1, micro_batch)] if stage else []
    forward = PipelineAction(ActionKind.FORWARD, stage, micro_batch)
    return [forward, PipelineAction(kind, stage + 1, micro_batch)] if stage < last else [forward]


def _groups(ranks: int, micro_batches: int) -> list[range]:
    """Split micro-batches into groups that pass all chunks of a rank before the next group
    enters. A group has at least as many micro-batches as there are ranks, or the pipeline would
    run dry between chunks; larger groups come first, because the first one sets the length of
    the warm-up."""
    count = max(1, micro_batches // ranks)
    least, more = divmod(micro_batches, count)
    edges = [group * least + min(group, more) for group in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]
