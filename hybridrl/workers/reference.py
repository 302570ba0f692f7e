"""ReferenceWorker: the policy as it was at the beginning, for the KL."""

from __future__ import annotations

from pathlib import Path

from hybridrl.config.schema import ActorConfig
from hybridrl.controller import ONE_TO_ALL, THREE_D, Context, transfer
from hybridrl.core.batch import Batch
from hybridrl.engine.train import TrainEngine
from hybridrl.workers.engines import ModelSource, policy_engine
from hybridrl.workers.generation import SAMPLE
from hybridrl.workers.model_worker import ModelWorker


class ReferenceWorker(ModelWorker):
    """One rank of the frozen model.

    Args:
        source: The model.
        config: Micro-batch budget and offload.
        temperature: That of the actor's sampling.
    """

    def __init__(
        self, context: Context, source: ModelSource, config: ActorConfig, temperature: float
    ) -> None:
        super().__init__(context)
        self._temperature = temperature
        self._engine = policy_engine(context, source, config, trains=False)

    @property
    def model_engine(self) -> TrainEngine:
        return self._engine

    @transfer(ONE_TO_ALL)
    def load_weights(self, folder: str) -> None:
        """Takes the weights of a model folder, those that this model has too."""
        self._engine.load(Path(folder))

    @transfer(THREE_D, reads=SAMPLE, makes=("ref_log_probs",), streams=True)
    def compute_ref_log_prob(self, batch: Batch) -> Batch:
        """`ref_log_probs` of the responses."""
        with self.phase("score"):
            scored = self._engine.forward(batch, temperature=self._temperature)
        return Batch.from_columns({"ref_log_probs": scored.ragged("log_probs")})
