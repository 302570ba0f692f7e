"""HybridEngine: one policy in two forms, sharded for training and whole for generation.

The generation form is brought up to date when it is next needed, so no driver program can forget
to do it, and updates that follow each other move nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from hybridrl.core.batch import Batch
from hybridrl.core.device import free_cached_memory, synchronize
from hybridrl.engine.train import Loss, TrainEngine
from hybridrl.rollout.base import RolloutEngine, Sampling

Phase = Callable[[str], AbstractContextManager[None]]
NOT_LOADED = -1


class HybridEngine:
    """Trains with `train`, generates with `rollout`, which may be missing.

    Attributes:
        policy_version: Number of optimizer steps so far. Every sample carries the version that
            made it.
    """

    def __init__(self, train: TrainEngine, rollout: RolloutEngine | None, phase: Phase) -> None:
        self.train = train
        self.rollout = rollout
        self.policy_version = 0
        self._loaded_version = 0
        self._phase = phase

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Batch:
        """One response per prompt, from the newest weights. Where the engine does not say which of
        its tokens were sampled, all were: `response_mask` is 1."""
        if self._loaded_version != self.policy_version:
            with self._phase("sync"):
                self._synchronise()
        with self._phase("generate"):
            samples = self.rollout.generate(batch, sampling, seed)
        self.rollout.sleep()
        if not self.rollout.keeps_weights:
            self._loaded_version = NOT_LOADED
        free_cached_memory(self.train.device)
        columns = {"policy_version": torch.full((len(batch),), self.policy_version)}
        if "response_mask" not in samples:
            tokens = samples.ragged("response_ids")
            ones = torch.ones(len(tokens.values), dtype=torch.uint8)
            columns["response_mask"] = tokens._replace(values=ones)
        return samples.with_columns(columns)

    def update(self, batch: Batch, loss: Loss, **options: Any) -> dict[str, float]:
        """One optimizer step; see `TrainEngine.update`."""
        with self._phase("train"):
            metrics = self.train.update(batch, loss, **options)
            synchronize(self.train.device)
        self.policy_version += 1
        return metrics

    def _synchronise(self) -> None:
        self.rollout.wake()
        with torch.no_grad():
            self.rollout.load(self.train.full_weights())
        synchronize(self.train.device)
        self._loaded_version = self.policy_version
