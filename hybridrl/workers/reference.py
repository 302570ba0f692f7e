"""ReferenceWorker: the policy as it was at the beginning, for the KL."""

from __future__ import annotations

from hybridrl.config.schema import ActorConfig
from hybridrl.controller import DP, Context, Worker, transfer
from hybridrl.core.batch import Batch
from hybridrl.workers.policy import ModelSource, build_engine


class ReferenceWorker(Worker):
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
        self._engine = build_engine(context, source, config)
        self._engine.policy.requires_grad_(False)

    @transfer(DP)
    def compute_ref_log_prob(self, batch: Batch) -> Batch:
        """`ref_log_probs` of the responses."""
        with self.phase("score"):
            scored = self._engine.forward(batch, self._temperature)
        return Batch.from_columns({"ref_log_probs": scored.ragged("log_probs")})
