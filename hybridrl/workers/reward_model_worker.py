"""RewardModelWorker: a model that learns from pairs which of two answers people prefer."""

from __future__ import annotations

import torch

from hybridrl.algorithms import BradleyTerryObjective, TokenSegments
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import ActorConfig
from hybridrl.controller import THREE_D, UPDATE_PAIRS, WorkerContext, transfer
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.workers.generation import SAMPLE_COLUMNS, UPDATE_COLUMNS
from hybridrl.workers.model_worker import TrainedModelWorker
from hybridrl.workers.training_engines import ModelSource, build_scalar_engine


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
        context: WorkerContext,
        source: ModelSource,
        config: ActorConfig,
        objective: BradleyTerryObjective,
        updates: int,
    ) -> None:
        super().__init__(context, source)
        self._objective = objective
        self.model_engine = build_scalar_engine(context, source, config, reads="after")
        self.model_engine.start_optimizer(config.optimizer, updates)

    @transfer(THREE_D, reads=SAMPLE_COLUMNS, makes=("scores",))
    def compute_score(self, batch: Batch) -> Batch:
        """Compute the `scores`, one for each row."""
        with self.phase("score"):
            return Batch.from_columns({"scores": compute_sample_scores(self.model_engine, batch)})

    @transfer(UPDATE_PAIRS, reads=UPDATE_COLUMNS, may_read=("margin",))
    def update_reward_model(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on pairs of rows, the chosen one first."""
        return self._update(batch, self._objective, rows_together=2)


def compute_sample_scores(engine: TrainEngine, batch: Batch) -> torch.Tensor:
    """Return the reward model's score of each row, `[rows]`: its value at the last token."""
    values = engine.forward(batch).ragged("values")
    return TokenSegments.from_cu_seqlens(values.cu_seqlens).last(values.values)
