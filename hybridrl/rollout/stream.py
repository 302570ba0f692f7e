"""SampleStream: the samples of one batch as they finish, on one of several replicas.

The prompts are dealt out longest first. Each replica begins with as many as it can run at a time;
what is left is claimed one prompt at a time by whichever replica has room, so that none waits while
another is behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hybridrl.batch.batch import Batch
from hybridrl.rollout.rollout_engine import (
    Finished,
    Request,
    RolloutEngine,
    Sampling,
    ragged,
    responses,
)
from hybridrl.rollout.token_versions import TokenVersions


class Share(NamedTuple):
    """A replica's place among those that generate one batch.

    Attributes:
        index, replicas: Which of how many.
        claim: Gives numbers from 0 on, each to one replica only. The ranks of a replica call it
            together, and get the same.
    """

    index: int
    replicas: int
    claim: Callable[[], int]


class SampleStream:
    """The samples that this replica makes of a batch.

    Args:
        engine: Takes requests.
        prompts: Of every row; equal neighbours are samples of one prompt.
        seeds: Of every row; those of one prompt's samples follow each other.
        at_a_time: Samples that the engine runs at a time.
        version: Of the weights that the engine has.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        prompts: list[list[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        share: Share,
        at_a_time: int,
        version: int,
    ) -> None:
        self.total = len(prompts)
        self._engine = engine
        self._sampling = sampling
        self._seeds = seeds
        self._at_a_time = at_a_time
        self._versions = TokenVersions(version)
        self._running = 0
        self._requests = self._shared_out(prompts, share)
        self._next: Request | None = next(self._requests, None)

    def take(
        self, least: int, refresh: Callable[[], int] | None = None
    ) -> tuple[Batch, npt.NDArray[np.int64]]:
        """At least so many samples, or all that are left for this replica, and their rows.

        Args:
            refresh: Called between two tokens: it may give the engine new weights, and says which
                version the engine has.

        Returns:
            As `RolloutEngine.generate`, with `token_versions`: the policy version that made each
            token.
        """
        done: list[Finished] = []
        versions: list[list[int]] = []
        while len(done) < least and (self._running or self._next is not None):
            self._fill()
            if refresh is not None:
                self._versions.change(refresh(), self._engine.progress)
            for finished in self._engine.poll():
                self._running -= 1
                done.append(finished)
                versions.append(self._versions.end(finished.key, len(finished.token_ids)))
        samples = responses(
            [finished.token_ids for finished in done],
            [finished.log_probs for finished in done],
            [finished.finish_reason for finished in done],
            [finished.routes for finished in done if finished.routes is not None],
            self._engine.routes_dtype,
        )
        rows = np.array([finished.key for finished in done], dtype=np.int64)
        return samples.with_columns({"token_versions": ragged(versions, torch.int64)}), rows

    def _fill(self) -> None:
        while (request := self._next) is not None:
            if self._running and self._running + request.samples > self._at_a_time:
                return
            self._engine.start(request)
            self._running += request.samples
            self._versions.begin(range(request.key, request.key + request.samples))
            self._next = next(self._requests, None)

    def _shared_out(self, prompts: list[list[int]], share: Share) -> Iterator[Request]:
        """This replica's requests, in the order in which they begin."""
        groups = [
            list(group) for _, group in itertools.groupby(range(len(prompts)), prompts.__getitem__)
        ]
        groups.sort(key=lambda group: -len(prompts[group[0]]))
        requests = [
            Request(group[0], prompts[group[0]], self._sampling, self._seeds[group[0]], len(group))
            for group in groups
        ]
        largest = max((request.samples for request in requests), default=1)
        first = min(len(requests), share.replicas * max(1, self._at_a_time // largest))
        yield from requests[share.index : first : share.replicas]
        if first == len(requests):
            return
        while (number := first + share.claim()) < len(requests):
            yield requests[number]
