"""The hybrid engine: one policy that is sharded one way for training and another way for
generation.

The generation weights are brought up to date when they are next needed, so no driver program can
forget to do it, and updates that follow each other move nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from hybridrl.batch.batch import Batch
from hybridrl.engine.train_engine import LossFunction, TrainEngine
from hybridrl.errors import RolloutError
from hybridrl.rollout.rollout_engine import SamplingSettings
from hybridrl.rollout.sample_generator import (
    GenerationTask,
    NumberedSamples,
    SampleGenerator,
    SampleStream,
)
from hybridrl.system.device_traits import free_cached_memory, synchronize_device
from hybridrl.system.dtypes import DTYPES
from hybridrl.weights.encoded_reshard import SyncCost
from hybridrl.weights.weight_sync import WeightSync

PhaseTimer = Callable[[str], AbstractContextManager[None]]
_NOT_LOADED = -1


class HybridEngine:
    """An engine that trains with `train` and generates with `rollout`, which may be None.

    Args:
        dtype: Name of the precision of the rollout engine's weights.
        verify: Compare all weights after each sync; as slow as loading them.

    Attributes:
        policy_version: Number of optimizer steps (also of those left out), and of loaded weights,
            so far. Every sample carries the version that made it.
        cost: Of the sync before the last generation; None if there was none, or if weights went
            whole.
    """

    def __init__(
        self,
        train: TrainEngine,
        rollout: SampleGenerator | None,
        phase: PhaseTimer,
        dtype: str = "float32",
        verify: bool = False,
    ) -> None:
        self.train = train
        self.rollout = rollout
        self.policy_version = 0
        self.cost: SyncCost | None = None
        lacks = False
        if rollout is not None:
            engine = rollout.engine
            engine.sleep()  # the roles that are built after this one need the memory
            lacks = engine.awaits_weights or not engine.keeps_weights or train.differs_from_folder
        self._loaded_version = _NOT_LOADED if lacks else 0
        self._phase = phase
        self._dtype = DTYPES[dtype]
        self._verify = verify
        self._stream: SampleStream | None = None
        self._sync: WeightSync | None = None
        self._is_planned = False

    def generate(self, batch: Batch, sampling: SamplingSettings, seeds: Sequence[int]) -> Batch:
        """Generate one response per prompt from the newest weights, each with its seed."""
        self._make_ready()
        with self._phase("generate"):
            samples = self.rollout.generate(batch, sampling, seeds)
        self._rest()
        versions = torch.full((len(batch),), self.policy_version)
        return add_response_mask(samples).with_columns({"policy_version": versions})

    def begin(self, batch: Batch, sampling: SamplingSettings, seeds: Sequence[int]) -> None:
        """Begin to generate as `generate` does; `take` returns the samples."""
        self._make_ready()
        task = GenerationTask(batch, sampling, seeds, self.policy_version)
        self._stream = self.rollout.begin(task)

    @property
    def is_generating(self) -> bool:
        """Return whether a generation is under way; its KV cache has the memory of the trainer's
        weights."""
        return self._stream is not None

    def take(self, least: int, last: bool) -> NumberedSamples:
        """Return at least this many of the samples that were begun, or all that are left, with
        their `token_versions`; end the generation if they are the last."""
        assert self._stream is not None
        with self._phase("generate"):
            samples, rows = self._stream.next_samples(least)
        if last:
            self._stream.close()
            self._stream = None
            self._rest()
        return add_response_mask(samples), rows

    def _make_ready(self) -> None:
        """Bring the generation weights up to date. The trainer's own give way to the KV cache, if
        they may."""
        self.cost = None
        if self._loaded_version != self.policy_version:
            with self._phase("sync"):
                self._synchronise()
        self.train.offload()

    def _rest(self) -> None:
        """Give the memory of a generation back."""
        engine = self.rollout.engine
        engine.sleep()
        if not engine.keeps_weights:
            self._loaded_version = _NOT_LOADED
        free_cached_memory(self.train.device)

    def update(self, batch: Batch, loss: LossFunction, **options: Any) -> dict[str, float]:
        """Run one optimizer step; see `TrainEngine.update`."""
        with self._phase("train"):
            metrics = self.train.update(batch, loss, **options)
            synchronize_device(self.train.device)
        self.policy_version += 1
        return metrics

    def leave_out_update(self) -> None:
        """Count an update that is not made; see `TrainEngine.leave_out_update`."""
        self.train.leave_out_update()
        self.policy_version += 1

    def load(self, folder: Path) -> None:
        """Load the weights of a model folder; see `TrainEngine.load_weights`. They count as a new
        policy version, so the next generation uses them."""
        self.train.load(folder)
        self.policy_version += 1

    def resume(self, policy_version: int) -> None:
        """Go on with the state that was loaded into the trainer, which is of this policy version.
        The next generation uses its weights."""
        self.policy_version = policy_version
        self._loaded_version = _NOT_LOADED

    @torch.no_grad()
    def _synchronise(self) -> None:
        engine = self.rollout.engine
        engine.wake()
        if not self._is_planned:
            self._sync = WeightSync.between(self.train, engine, self._dtype)
            self._is_planned = True
        if self._sync is None:
            engine.load(self.train.weights_for(engine.takes_adapters))
        else:
            self.cost = self._sync.run()
            if self._verify and (wrong := engine.differences(self.train.full_weights())):
                raise RolloutError(
                    f"{len(wrong)} parts of the weights are not those of the trainer after the "
                    f"sync of policy version {self.policy_version}: {' '.join(wrong[:3])}"
                )
        synchronize_device(self.train.device)
        self._loaded_version = self.policy_version


def add_response_mask(samples: Batch) -> Batch:
    """Add a `response_mask` of ones to samples that have none: unless the engine says otherwise,
    all response tokens were sampled."""
    if "response_mask" in samples:
        return samples
    tokens = samples.ragged("response_ids")
    ones = torch.ones(len(tokens.values), dtype=torch.uint8)
    return samples.with_columns({"response_mask": tokens._replace(values=ones)})
