"""Lockstep: episodes on ranks that share an engine.

Such ranks must make the same requests and the same polls in the same order, but tools and
environments answer each of them at another moment. So one rank, the leader, plays the episodes, and
says what it does with its engine; its peers do the same with theirs, and nothing else. What comes
of it is the leader's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hybridrl.batch.batch import Batch
from hybridrl.rollout.around import AroundEngine
from hybridrl.rollout.episode_batch import NOTHING, episode_batch
from hybridrl.rollout.playing import Playing, PlaysEpisodes
from hybridrl.rollout.rollout_engine import Finished, Request, RolloutEngine, Sampling

Refresh = Callable[[], int]


class Poll(NamedTuple):
    """What the ranks do together: drop these samples, start these requests, poll."""

    dropped: list[int]
    started: list[Request]


REFRESH, RETURN = "refresh", "return"
"""What else they do: ask for new weights; return from `Playing.take`."""


class LeadingEngine(AroundEngine):
    """The leader's engine: what it is asked, its peers ask theirs."""

    def __init__(self, engine: RolloutEngine, peers: dist.ProcessGroup) -> None:
        super().__init__(engine)
        self.continuous = engine.continuous  # type: ignore[misc]
        self._peers = peers
        self._next = Poll([], [])

    def start(self, request: Request) -> None:
        self._next.started.append(request)

    def abort(self, keys: Iterable[int]) -> None:
        keys = set(keys)
        started = [request for request in self._next.started if request.key not in keys]
        self._next = Poll([*self._next.dropped, *sorted(keys)], started)

    def poll(self) -> list[Finished]:
        todo, self._next = self._next, Poll([], [])
        self.tell(todo)
        return _polled(self._engine, todo)

    def cancel(self) -> None:
        self._next = Poll([], [])
        self._engine.cancel()  # peers do so when they close

    def progress(self) -> dict[int, int]:
        return {request.key: 0 for request in self._next.started} | self._engine.progress()

    def tell(self, what: Any) -> None:
        """Has the peers do this, too."""
        _first_says(what, self._peers)


class LeadingRollout(PlaysEpisodes):
    """The leader's episodes.

    Args:
        rollout: Plays them, around a `LeadingEngine`.
    """

    def __init__(self, rollout: PlaysEpisodes, engine: LeadingEngine) -> None:
        super().__init__(rollout)
        self._rollout, self._leading = rollout, engine

    def begin(
        self, batch: Batch, sampling: Sampling, seeds: Sequence[int], version: int
    ) -> Playing:
        return _Leading(self._rollout.begin(batch, sampling, seeds, version), self._leading)

    def notices(self) -> list[str]:
        return self._rollout.notices()


class FollowingRollout(PlaysEpisodes):
    """A peer's. Its samples are empty: the leader has them."""

    def __init__(self, engine: RolloutEngine, peers: dist.ProcessGroup) -> None:
        super().__init__(engine)
        self._peers = peers

    def begin(
        self, batch: Batch, sampling: Sampling, seeds: Sequence[int], version: int
    ) -> Playing:
        return _Following(self._engine, self._peers)

    def generate(self, batch: Batch, sampling: Sampling, seed: int | Sequence[int]) -> Batch:
        super().generate(batch, sampling, seed)
        return episode_batch([NOTHING] * len(batch), [], branching=False)


class _Leading(Playing):
    def __init__(self, playing: Playing, engine: LeadingEngine) -> None:
        self._playing, self._engine = playing, engine

    def take(
        self, least: int, refresh: Refresh | None = None
    ) -> tuple[Batch, npt.NDArray[np.int64]]:
        def together() -> int:
            self._engine.tell(REFRESH)
            return refresh()  # type: ignore[misc]

        try:
            return self._playing.take(least, together if refresh else None)
        finally:
            self._engine.tell(RETURN)

    def close(self) -> None:
        self._playing.close()


class _Following(Playing):
    def __init__(self, engine: RolloutEngine, peers: dist.ProcessGroup) -> None:
        self._engine, self._peers = engine, peers

    def take(
        self, least: int, refresh: Refresh | None = None
    ) -> tuple[Batch, npt.NDArray[np.int64]]:
        while (said := _first_says(None, self._peers)) != RETURN:
            if said == REFRESH:
                refresh()  # type: ignore[misc]
            else:
                _polled(self._engine, said)
        return episode_batch([], [], branching=False), np.zeros(0, np.int64)

    def close(self) -> None:
        self._engine.cancel()


def _polled(engine: RolloutEngine, todo: Poll) -> list[Finished]:
    if todo.dropped:
        engine.abort(todo.dropped)
    for request in todo.started:
        engine.start(request)
    return engine.poll()


def _first_says(what: Any, peers: dist.ProcessGroup) -> Any:
    """The same on all ranks: what the first one says."""
    said = [what]
    dist.broadcast_object_list(said, group=peers, group_src=0, device=torch.device("cpu"))
    return said[0]
