"""SampleGenerator: makes samples of a batch of prompts with an engine, and gives them as they
finish. It has an engine, whose weights and memory are the engine's own affair. A sample of the
`SingleTurnGenerator` is one response of the engine's.

Where several replicas generate a batch, each has a part of the prompts: they are dealt out longest
first, or, with `data.order=prefix`, each gets neighbours, which begin alike. It starts as many as
it can run at a time. What is left is claimed one prompt at a time by whichever replica has room,
its own part's before those of others, so that none waits while another is behind.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import Batch
from hybridrl.batch.row_balancing import split_by_runs
from hybridrl.rollout.rollout_engine import (
    EngineOutput,
    Request,
    RequestQueue,
    RolloutEngine,
    SamplingSettings,
    build_response_batch,
    ragged,
    requests_of,
    row_seeds,
)

Refresh = Callable[[], int]
"""Called between two tokens: may give the engine new weights, and returns their version."""
NumberedSamples = tuple[Batch, npt.NDArray[np.int64]]
"""Samples, and the number of each one's row in the batch."""


class ReplicaShare(NamedTuple):
    """A replica's place among those that generate one batch.

    Attributes:
        index, replicas: Which of how many.
        claim: Gives numbers from 0 on, each to one replica only, for each queue by its number. The
            ranks of a replica call it together, and get the same.
        neighbours: Each has neighbouring prompts, for these begin alike.
    """

    index: int
    replicas: int
    claim: Callable[[int], int]
    neighbours: bool = False


class GenerationTask(NamedTuple):
    """A batch to make samples of.

    Attributes:
        batch: Prompts, and columns of the data, of all replicas.
        seeds: One a row, on which alone it depends what the row samples.
        version: Policy version of the engine's weights.
        share: This replica's; None: all rows.
    """

    batch: Batch
    sampling: SamplingSettings
    seeds: Sequence[int]
    version: int = 0
    share: ReplicaShare | None = None

    def block(self) -> tuple[GenerationTask, int]:
        """Return a task of the replica's own block of rows, and the number of the first of them.
        No block has a part of the neighbouring rows that are samples of one prompt (`group_id`)."""
        if self.share is None:
            return self, 0
        batch = self.batch
        groups = batch["group_id"].tolist() if "group_id" in batch else range(len(batch))
        rows = split_by_runs(groups, self.share.replicas)[self.share.index]
        own = self._replace(batch=batch.take(rows), seeds=[self.seeds[row] for row in rows])
        return own, rows.start


class TokenVersions:
    """Follows which version of the policy makes each token of the samples under way, while the
    engine's weights may change between two of their tokens.

    Args:
        version: Of the weights that the engine has.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self._begins: dict[int, list[tuple[int, int]]] = {}  # by key: from which token on

    def begin(self, keys: Iterable[int]) -> None:
        """Begin to follow these samples."""
        for key in keys:
            self._begins[key] = [(0, self.version)]

    def change(self, version: int, progress: Callable[[], dict[int, int]]) -> None:
        """Note the engine's version.

        Args:
            progress: Says how many tokens each sample under way has, by key.
        """
        if version == self.version:
            return
        self.version, tokens = version, progress()
        for key, begins in self._begins.items():
            begins.append((tokens.get(key, 0), version))

    def end(self, output: EngineOutput) -> EngineOutput:
        """Return a sample that is over with the version of each of its tokens."""
        begins, length = self._begins.pop(output.key), len(output.token_ids)
        ends = [start for start, _ in begins[1:]] + [length]
        versions = [
            version
            for (start, version), end in zip(begins, ends, strict=True)
            for _ in range(start, min(end, length))
        ]
        return output._replace(versions=versions)

    def drop(self, keys: Iterable[int]) -> None:
        """Follow these samples no longer."""
        for key in keys:
            self._begins.pop(key, None)


class SampleStream(ABC):
    """The samples that a replica makes of a batch, as they finish."""

    def __init__(self, requests: RequestQueue, version: int) -> None:
        self._requests, self._versions = requests, TokenVersions(version)

    def next_samples(self, least: int, refresh: Refresh | None = None) -> NumberedSamples:
        """Return at least so many samples, or all that are left for this replica.

        Returns:
            The columns of `RolloutEngine.generate`, or of `episode_batch`, with `token_versions`:
            the policy version that made each token.
        """
        try:
            return self._collect(least, refresh)
        finally:
            self._requests.end_call()

    @abstractmethod
    def _collect(self, least: int, refresh: Refresh | None) -> NumberedSamples: ...

    def _refresh(self, refresh: Refresh | None) -> None:
        if refresh is not None:
            self._versions.change(self._requests.refresh(refresh), self._requests.progress)

    def close(self) -> None:
        """Drop what is still under way."""
        self._requests.cancel()


class SampleGenerator(ABC):
    """Makes samples with an engine.

    Args:
        requests: Where it asks for turns; None: the engine itself.

    Attributes:
        notices: Sentences on episodes that failed, which whoever reports them takes out.
        remarks: Other sentences on episodes, likewise.
    """

    def __init__(self, engine: RolloutEngine, requests: RequestQueue | None = None) -> None:
        self.engine, self.requests = engine, requests or engine
        self.notices: list[str] = []
        self.remarks: list[str] = []

    @abstractmethod
    def begin(self, task: GenerationTask) -> SampleStream:
        """Begin a sample of each row."""

    def generate(
        self, batch: Batch, sampling: SamplingSettings, seed: int | Sequence[int]
    ) -> Batch:
        """Make all samples, in the order of the rows; the columns are those of the stream, but for
        `token_versions`. The arguments are those of `RolloutEngine.generate`."""
        stream = self.begin(GenerationTask(batch, sampling, row_seeds(seed, len(batch))))
        try:
            samples, rows = stream.next_samples(len(batch))
        finally:
            stream.close()
        return drop_token_versions(samples.take(np.argsort(rows)))

    def close(self) -> None:
        """End it and its engine."""
        self.engine.close()


def drop_token_versions(samples: Batch) -> Batch:
    """Return samples of weights that did not change while they were made."""
    return samples.select([n for n in samples.columns if not n.endswith("token_versions")])


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
        while len(done) < least and (self._running or self._next is not None):
            self._fill()
            self._refresh(refresh)
            for finished in self._requests.poll():
                self._running -= 1
                done.append(self._versions.end(finished))
        samples = build_response_batch(
            done, self._engine.routes_dtype, keeps_sets=self._engine.keeps_sets
        )
        rows = np.array([finished.key for finished in done], dtype=np.int64)
        versions = ragged([finished.versions for finished in done], np.int64)
        return samples.with_columns({"token_versions": versions}), rows

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
        in_order = list(requests_of(task.batch, task.sampling, task.seeds))
        requests = sorted(in_order, key=lambda request: -len(request.prompt_ids))
        if (share := task.share) is None:
            yield from requests
            return
        parts = [requests[index :: share.replicas] for index in range(share.replicas)]
        if share.neighbours:
            parts = _cut_evenly(in_order, share.replicas)
        largest = max((request.samples for request in requests), default=1)
        room = max(1, self._engine.max_sequences // largest)
        yield from parts[share.index][:room]
        for queue in (*range(share.index, share.replicas), *range(share.index)):
            left = parts[queue][room:]
            while left and (number := share.claim(queue)) < len(left):
                yield left[number]


def _cut_evenly(requests: Sequence[Request], parts: int) -> list[list[Request]]:
    """Cut requests into parts of neighbours with about equally many tokens, if responses are as
    long as they may be."""
    costs = [len(one.prompt_ids) + one.samples * one.sampling.max_tokens for one in requests]
    middles = np.cumsum(costs) - np.array(costs) / 2
    cuts = np.searchsorted(middles, sum(costs) * np.arange(parts + 1) / parts)
    return [list(requests[start:stop]) for start, stop in itertools.pairwise(cuts)]
