"""ReferenceWorker: a model that does not learn, such as the policy as it was at the beginning, for
the KL, or a teacher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.batch.arrow_columns import RaggedColumn
from hybridrl.batch.batch import TEACHER_CHUNKS, TEACHER_IDS, TEACHER_LOG_PROBS, Batch
from hybridrl.batch.kept_sets import KEPT_SETS
from hybridrl.config.schema import ActorConfig, CacheConfig
from hybridrl.controller import ONE_TO_ALL, THREE_D, WorkerContext, transfer
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.workers.generation import SAMPLE_COLUMNS
from hybridrl.workers.log_prob_cache import LogProbCache
from hybridrl.workers.model_worker import ModelWorker
from hybridrl.workers.teacher_reading import TeacherReading, list_top_tokens, score_responses
from hybridrl.workers.training_engines import ModelSource, build_policy_engine


def list_scored_columns(keywords: Mapping[str, Any]) -> Sequence[str]:
    """Return the columns that `compute_ref_log_prob` makes in workers built with these keywords."""
    aligned = keywords.get("alignment") == "bytes"
    return ("ref_log_probs", TEACHER_CHUNKS) if aligned else ("ref_log_probs",)


class ReferenceWorker(ModelWorker):
    """One rank of the frozen model.

    Args:
        source: The model.
        config: Micro-batch budget and offload.
        temperature: At which responses are scored.
        top_k: Of `compute_top_log_probs`.
        cache: Of `compute_ref_log_prob`; None: there is none.
        alignment: `bytes`: it has a tokenizer of its own (`distillation.alignment`).
        system_prompt: Of the student's chats, which such a model reads in its own template.
    """

    model_engine: TrainEngine

    def __init__(
        self,
        context: WorkerContext,
        source: ModelSource,
        config: ActorConfig,
        temperature: float,
        top_k: int = 0,
        cache: CacheConfig | None = None,
        alignment: str = "tokens",
        system_prompt: str | None = None,
    ) -> None:
        super().__init__(context)
        self._temperature, self._top_k = temperature, top_k
        self.model_engine = build_policy_engine(context, source, config, trains=False)
        self._cache = LogProbCache(cache, self.model_engine, source, temperature)
        self._reading = None
        if alignment == "bytes":
            self._reading = TeacherReading(source, source.path, system_prompt)

    @transfer(ONE_TO_ALL)
    def load_weights(self, folder: str, share: float = 1.0) -> None:
        """Load the weights of a model folder that this model has too; or, with a `share` below 1,
        move the model's weights towards them, as a moving average does."""
        self.model_engine.load(Path(folder), share)

    @transfer(
        THREE_D,
        reads=SAMPLE_COLUMNS,
        follows=(KEPT_SETS,),
        makes=list_scored_columns,
        streams=True,
    )
    def compute_ref_log_prob(self, batch: Batch) -> Batch:
        """Compute the `ref_log_probs` of the responses; with `alignment=bytes` of their chunks, and
        `teacher_chunks`."""
        with self.phase("score"):
            return score_responses(self._reading, batch, partial(self._cache.score, self))

    @transfer(THREE_D, reads=SAMPLE_COLUMNS, makes=(TEACHER_IDS, TEACHER_LOG_PROBS), streams=True)
    def compute_top_log_probs(self, batch: Batch) -> Batch:
        """Compute the `top_k` tokens that this model finds likeliest in place of each response
        token: `teacher_ids` and `teacher_log_probs`, `top_k` numbers per token, one token after the
        other."""
        with self.phase("score"):
            width = self.model_engine.model.shapes(top_k=self._top_k)["top_ids"][0]
            return list_top_tokens(self._reading, batch, self._ask, width)

    def _ask(self, batch: Batch) -> Iterator[RaggedColumn]:
        engine, top_k = self.model_engine, self._top_k
        scored = engine.forward(batch, temperature=self._temperature, top_k=top_k)
        return map(scored.ragged, ("log_probs", "top_ids", "top_log_probs"))
