"""HybridEngine: one policy in two forms, sharded for training and whole for generation.

The generation form is brought up to date when it is next needed, so no driver program can forget
to do it, and updates that follow each other move nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from hybridrl.core.batch import Batch
from hybridrl.core.device import free_cached_memory, synchronize
from hybridrl.engine.train import Loss, TrainEngine
from hybridrl.rollout.base import RolloutEngine, Sampling

Phase = Callable[[str], AbstractContextManager[None]]


class HybridEngine:
    """Trains with `train`, generates with `rollout`.

    Attributes:
        policy_version: Number of optimizer steps so far. Every sample carries the version that
            made it.
    """

    def __init__(self, train: TrainEngine, rollout: RolloutEngine, phase: Phase) -> None:
        self.train = train
        self.rollout = rollout
        self.policy_version = 0
        self._loaded_version = 0
        self._phase = phase

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Batch:
        """One response per prompt, from the newest weights."""
        if self._loaded_version != self.policy_version:
            with self._phase("sync"):
                self._synchronise()
        with self._phase("generate"):
            samples = self.rollout.generate(batch, sampling, seed)
        lengths = torch.from_numpy(samples.lengths("response_ids"))
        self.rollout.sleep()
        free_cached_memory(self.train.device)
        ones = torch.ones(int(lengths.sum()), dtype=torch.uint8)
        return samples.with_columns(
            {
                "response_mask": samples.ragged("response_ids")._replace(values=ones),
                "policy_version": torch.full((len(batch),), self.policy_version),
            }
        )

    def update(self, batch: Batch, loss: Loss, temperature: float) -> dict[str, float]:
        """One optimizer step."""
        with self._phase("train"):
            metrics = self.train.update(batch, loss, temperature)
            synchronize(self.train.device)
        self.policy_version += 1
        return metrics

    def _synchronise(self) -> None:
        self.rollout.wake()
        with torch.no_grad():
            self.rollout.load(self.train.full_parameters())
        synchronize(self.train.device)
        self._loaded_version = self.policy_version
