"""CriticWorker: estimates, before each token, the reward that is still to come."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hybridrl.algorithms import TokenLoss, TokenSegments, value_loss
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import ActorConfig
from hybridrl.controller import THREE_D, UPDATE, WorkerContext, transfer
from hybridrl.workers.generation import SAMPLE_COLUMNS, UPDATE_COLUMNS
from hybridrl.workers.model_worker import TrainedModelWorker
from hybridrl.workers.training_engines import ModelSource, build_scalar_engine


class CriticWorker(TrainedModelWorker):
    """One rank of the value model.

    Args:
        source: A reward model, or a language model that gets a new head.
        config: Training.
        value_clip: See `value_loss`.
        prefix: Of its columns and metrics: empty, or `cost_`.
        updates: Optimizer steps of the whole job, for the schedule.
    """

    def __init__(
        self,
        context: WorkerContext,
        source: ModelSource,
        config: ActorConfig,
        value_clip: float | None,
        prefix: str,
        updates: int,
    ) -> None:
        super().__init__(context, source)
        self._value_clip = value_clip
        self._prefix = prefix
        self.model_engine = build_scalar_engine(context, source, config, reads="before")
        self.model_engine.start_optimizer(config.optimizer, updates)

    @transfer(THREE_D, reads=SAMPLE_COLUMNS, makes=lambda built: [f"{built['prefix']}values"])
    def compute_values(self, batch: Batch) -> Batch:
        """Compute the `values` (`cost_values`) of the response tokens."""
        with self.phase("score"):
            found = self.model_engine.forward(batch)
        return Batch.from_columns({f"{self._prefix}values": found.ragged("values")})

    @transfer(
        UPDATE,
        reads=lambda built: [
            *UPDATE_COLUMNS,
            *(f"{built['prefix']}{n}" for n in ("values", "returns")),
        ],
    )
    def update_critic(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step towards the `returns` (`cost_returns`), and return the metrics of
        the whole mini-batch."""
        metrics = self._update(batch, self._value_loss)
        return {f"{self._prefix}critic_{name}": value for name, value in metrics.items()}

    def _value_loss(
        self, outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor], segments: TokenSegments
    ) -> TokenLoss:
        values, returns = outputs["values"], columns[f"{self._prefix}returns"]
        old = columns[f"{self._prefix}values"]
        loss, metrics = value_loss(values, old, returns, self._value_clip, mask=segments.mask)
        values = values.detach()
        # Enough for the share of the returns' variance that the values explain.
        return TokenLoss(
            loss,
            metrics
            | {
                "value": values,
                "return": returns,
                "return_square": returns.square(),
                "error_square": (values - returns).square(),
            },
        )
