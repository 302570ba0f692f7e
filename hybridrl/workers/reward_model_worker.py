"""RewardModelWorker: a model that learns from pairs which of two answers people prefer."""

from __future__ import annotations

import torch

from hybridrl.algorithms import BradleyTerry, Segments
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import ActorConfig
from hybridrl.controller import THREE_D, UPDATE_PAIRS, Context, transfer
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.system.device_traits import synchronize
from hybridrl.workers.generation import LEARNED, SAMPLE
from hybridrl.workers.model_worker import TrainedModelWorker
from hybridrl.workers.training_engines import ModelSource, scalar_engine


class RewardModelWorker(TrainedModelWorker):
    """One rank of a reward model that is trained.

    Args:
        source: A language model that gets a new head, or a reward model to train on.
        config: Training.
        objective: The loss of a pair.
        updates: Optimizer steps of the whole job, for the schedule.
    """

    def __init__(
        self,
        context: Context,
        source: ModelSource,
        config: ActorConfig,
        objective: BradleyTerry,
        updates: int,
    ) -> None:
        super().__init__(context, source)
        self._objective = objective
        self._engine = scalar_engine(context, source, config, reads="after")
        self._engine.start_optimizer(config.optimizer, updates)

    @property
    def model_engine(self) -> TrainEngine:
        return self._engine

    @transfer(THREE_D, reads=SAMPLE, makes=("scores",))
    def compute_score(self, batch: Batch) -> Batch:
        """Compute the `scores`, one for each row."""
        with self.phase("score"):
            return Batch.from_columns({"scores": sample_scores(self._engine, batch)})

    @transfer(UPDATE_PAIRS, reads=LEARNED, may_read=("margin",))
    def update_reward_model(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on pairs of rows, the chosen one first."""
        with self.phase("train"):
            metrics = self._engine.update(batch, self._objective, rows_together=2)
            synchronize(self._engine.device)
        return metrics


def sample_scores(engine: TrainEngine, batch: Batch) -> torch.Tensor:
    """Return the reward model's score of each row, `[rows]`: its value at the last token."""
    values = engine.forward(batch).ragged("values")
    return Segments.from_cu_seqlens(values.cu_seqlens).last(values.values)
