"""Episodes on ranks that share one engine and have to call it in the same order.

Such ranks must make the same requests and the same polls in the same order, but tools and
environments answer each of them at another moment. So one rank, the leader, plays the episodes, and
says what it does with its engine; its peers do the same with theirs, and nothing else. What comes
of it is the leader's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hybridrl.batch.batch import Batch
from hybridrl.rollout.episode_batch import EMPTY_EPISODE, build_episode_batch
from hybridrl.rollout.rollout_engine import (
    EngineOutput,
    Enough,
    Request,
    RequestQueue,
    RolloutEngine,
    SamplingSettings,
)
from hybridrl.rollout.sample_generator import (
    GenerationTask,
    NumberedSamples,
    Refresh,
    SampleGenerator,
    SampleStream,
)


class LockstepPoll(NamedTuple):
    """One poll that all ranks make together: drop these samples, start these requests, poll."""

    dropped: list[int]
    started: list[Request]

    def run(self, engine: RolloutEngine) -> list[EngineOutput]:
        """Do it with this rank's engine."""
        if self.dropped:
            engine.abort(self.dropped)
        for request in self.started:
            engine.start(request)
        return engine.poll()


_REFRESH, _END_CALL = "refresh", "return"
"""What else they do: ask for new weights; return from `SampleStream.next_samples`."""


class LockstepRequests(RequestQueue):
    """The leader's requests: what it asks of its engine, its peers ask of theirs."""

    def __init__(self, engine: RolloutEngine, peers: dist.ProcessGroup) -> None:
        self.continuous = engine.continuous  # type: ignore[misc]
        self.partial = engine.partial  # type: ignore[method-assign]
        self._engine, self._peers = engine, peers
        self._next = LockstepPoll([], [])

    def start(self, request: Request) -> None:
        self._next.started.append(request)

    def abort(self, keys: Iterable[int]) -> None:
        keys = set(keys)
        started = [request for request in self._next.started if request.key not in keys]
        self._next = LockstepPoll([*self._next.dropped, *sorted(keys)], started)

    def poll(self, enough: Enough | None = None) -> list[EngineOutput]:
        todo, self._next = self._next, LockstepPoll([], [])
        _broadcast_object(todo, self._peers)
        return todo.run(self._engine)

    def cancel(self) -> None:
        self._next = LockstepPoll([], [])
        self._engine.cancel()  # peers do so when they close

    def progress(self) -> dict[int, int]:
        return {request.key: 0 for request in self._next.started} | self._engine.progress()

    def refresh(self, refresh: Refresh) -> int:
        _broadcast_object(_REFRESH, self._peers)
        return refresh()

    def end_call(self) -> None:
        _broadcast_object(_END_CALL, self._peers)


class LockstepFollower(SampleGenerator):
    """A peer's generator. Its samples are empty: the leader has them."""

    def __init__(self, engine: RolloutEngine, peers: dist.ProcessGroup) -> None:
        super().__init__(engine)
        self._peers = peers

    def begin(self, task: GenerationTask) -> SampleStream:
        return FollowerStream(self.engine, self._peers)

    def generate(
        self, batch: Batch, sampling: SamplingSettings, seed: int | Sequence[int]
    ) -> Batch:
        super().generate(batch, sampling, seed)
        empty = [EMPTY_EPISODE] * len(batch)
        return build_episode_batch(empty, keeps_sets=self.engine.keeps_sets)


class FollowerStream(SampleStream):
    """Does what the leader says until the leader returns."""

    def __init__(self, engine: RolloutEngine, peers: dist.ProcessGroup) -> None:
        super().__init__(engine, 0)
        self._engine, self._peers = engine, peers

    def _collect(self, least: int, refresh: Refresh | None) -> NumberedSamples:
        while (said := _broadcast_object(None, self._peers)) != _END_CALL:
            if said == _REFRESH:
                refresh()  # type: ignore[misc]
            else:
                said.run(self._engine)
        empty = build_episode_batch([], keeps_sets=self._engine.keeps_sets)
        return empty, np.zeros(0, np.int64)


def _broadcast_object(what: Any, peers: dist.ProcessGroup) -> Any:
    """Return what the first rank says, on all ranks."""
    said = [what]
    dist.broadcast_object_list(said, group=peers, group_src=0, device=torch.device("cpu"))
    return said[0]
