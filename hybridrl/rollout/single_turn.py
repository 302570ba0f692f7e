"""SingleTurnGenerator: a sample is one response of the engine's.

Where several replicas generate a batch, the prompts are dealt out longest first. Each replica
begins with as many as it can run at a time; what is left is claimed one prompt at a time by
whichever replica has room, so that none waits while another is behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from hybridrl.batch.batch import Batch
from hybridrl.rollout.engine_requests import (
    EngineOutput,
    Request,
    SamplingSettings,
    finished_batch,
    ragged,
    requests_of,
)
from hybridrl.rollout.rollout_engine import RolloutEngine
from hybridrl.rollout.sample_generator import (
    GenerationTask,
    NumberedSamples,
    Refresh,
    SampleGenerator,
    SampleStream,
)


class SingleTurnGenerator(SampleGenerator):
    """Makes responses, one turn each."""

    def begin(self, task: GenerationTask) -> SampleStream:
        return SingleTurnStream(self.engine, task)

    def generate(
        self, batch: Batch, sampling: SamplingSettings, seed: int | Sequence[int]
    ) -> Batch:
        return self.engine.generate(batch, sampling, seed)


class SingleTurnStream(SampleStream):
    """The responses that this replica generates to the prompts of all."""

    def __init__(self, engine: RolloutEngine, task: GenerationTask) -> None:
        super().__init__(engine, task.version)
        self._engine = engine
        self._running = 0
        self._left = self._shared_out(task)
        self._next: Request | None = next(self._left, None)

    def _collect(self, least: int, refresh: Refresh | None) -> NumberedSamples:
        done: list[EngineOutput] = []
        versions: list[list[int]] = []
        while len(done) < least and (self._running or self._next is not None):
            self._fill()
            self._refresh(refresh)
            for finished in self._requests.poll():
                self._running -= 1
                done.append(finished)
                versions.append(self._versions.end(finished.key, len(finished.token_ids)))
        samples = finished_batch(done, self._engine.routes_dtype)
        rows = np.array([finished.key for finished in done], dtype=np.int64)
        return samples.with_columns({"token_versions": ragged(versions, torch.int64)}), rows

    def _fill(self) -> None:
        while (request := self._next) is not None:
            if self._running and self._running + request.samples > self._engine.max_sequences:
                return
            self._requests.start(request)
            self._running += request.samples
            self._versions.begin(range(request.key, request.key + request.samples))
            self._next = next(self._left, None)

    def _shared_out(self, task: GenerationTask) -> Iterator[Request]:
        """Yield this replica's requests, in the order in which they begin."""
        requests = list(requests_of(task.batch, task.sampling, task.seeds))
        requests.sort(key=lambda request: -len(request.prompt_ids))
        if (share := task.share) is None:
            yield from requests
            return
        largest = max((request.samples for request in requests), default=1)
        first = share.replicas * max(1, self._engine.max_sequences // largest)
        yield from requests[share.index : first : share.replicas]
        if first >= len(requests):
            return
        while (number := first + share.claim()) < len(requests):
            yield requests[number]
