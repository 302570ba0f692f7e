"""LogProbCache: log-probabilities of fixed responses under a model that does not learn."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from hybridrl.batch.arrow_columns import RaggedColumn
from hybridrl.batch.batch import Batch
from hybridrl.batch.kept_sets import KEPT_SETS
from hybridrl.config.schema import CacheConfig
from hybridrl.controller import THREE_D
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.models.language_model import attention_of
from hybridrl.parallel.collectives import all_gather_distinct, reduce_over
from hybridrl.system.content_cache import compute_key, open_cache
from hybridrl.workers.model_worker import ModelWorker
from hybridrl.workers.training_engines import ModelSource


class LogProbCache:
    """Scores rows with a model that does not learn; with `cache.use=[log_probs]` only the rows that
    the cache lacks.

    Keys contain the weights as each rank holds them, the model's configuration, precision,
    temperature, parallelism and device, the tokens of a row, and what they were chosen from. All
    calls are collective.

    Args:
        config: None: there is no cache.
        engine: Of the model; one with adapters scores within `engine.untrained`.
    """

    def __init__(
        self,
        config: CacheConfig | None,
        engine: TrainEngine,
        source: ModelSource,
        temperature: float,
    ) -> None:
        self._cache = open_cache(config, "log_probs")
        self._engine, self._source, self._temperature = engine, source, temperature
        self._model = (-1, b"")

    def score(self, worker: ModelWorker, batch: Batch) -> RaggedColumn:
        """Return the log-probabilities of the response tokens. The worker reports how many rows
        were found."""
        if self._cache is None:
            return self._forward(batch)
        bounds, mesh = batch.ragged("response_ids").cu_seqlens, self._engine.mesh
        places = [mesh.mesh.coordinates(rank) for rank in range(mesh.mesh.size)]
        # The rank that answers for these rows decides for those that compute them with it.
        answers = THREE_D.speaks(worker.context.rank, places)
        keys = self._compute_keys(batch)
        found = self._cache.get_many(keys) if answers else [b""] * len(keys)
        is_missing = torch.tensor([value is None for value in found], dtype=torch.uint8)
        for axes in (("ring", "ulysses"), ("pp",), ("tp",)):
            reduce_over(mesh.group(*axes), is_missing, dist.ReduceOp.MAX)
        rows = is_missing.nonzero().flatten().tolist()
        most = reduce_over(mesh.group(), torch.tensor(len(rows)), dist.ReduceOp.MAX)
        values = torch.full((int(bounds[-1]),), torch.nan)
        parts = RaggedColumn(values, bounds).rows()
        for part, value in zip(parts, found, strict=True):
            if value:
                part.copy_(torch.frombuffer(bytearray(value), dtype=torch.float32))
        if most:  # a rank that has found all of its rows takes part in the others' collectives
            for row, computed in zip(rows, self._forward(batch.take(rows)).rows(), strict=True):
                parts[row].copy_(computed)
        if answers:
            self._cache.put_many({keys[row]: parts[row].numpy().tobytes() for row in rows})
            worker.report_cache(self._cache)
        return RaggedColumn(values, bounds)

    def _forward(self, batch: Batch) -> RaggedColumn:
        return self._engine.forward(batch, temperature=self._temperature).ragged("log_probs")

    def _compute_keys(self, batch: Batch) -> list[bytes | None]:
        if self._model[0] != self._engine.loads:
            self._model = self._engine.loads, self._identify_model()
        names = ("prompt_ids", "response_ids", *([KEPT_SETS] if KEPT_SETS in batch else []))
        ids = (batch.ragged(name).rows() for name in names)
        return [
            compute_key(self._model[1], *(part.long().numpy().tobytes() for part in row))
            for row in zip(*ids, strict=True)
        ]

    def _identify_model(self) -> bytes:
        """Hash all that the log-probabilities of given tokens depend on. Collective."""
        engine, source = self._engine, self._source
        inner, config, digest = engine.model.inner, engine.config, hashlib.blake2b()
        skips_adapters = engine.has_adapters and not engine.begins_with_adapters
        for name, part in [*engine.local_parameters().items(), *inner.named_buffers()]:
            if not (skips_adapters and ".lora_" in name):
                digest.update(repr((name, part.dtype, tuple(part.shape))).encode())
                raw = part.detach().cpu().contiguous().flatten().view(torch.uint8)
                digest.update(raw.numpy().data)
        weights, group = [digest.digest()], engine.mesh.group()
        if group is not None:
            weights = all_gather_distinct(weights[0], group)
        found = [
            *("log_probs", weights, inner.config.to_dict() | {"_name_or_path": None}),
            *(attention_of(inner), engine.model.rows, source.dtype, source.precision),
            *(self._temperature, config.parallel, config.compile),
            torch.get_float32_matmul_precision(),
            config.lora if engine.begins_with_adapters else None,
            torch.cuda.get_device_name() if engine.device.type == "cuda" else "cpu",
        ]
        return hashlib.blake2b(repr(found).encode()).digest()
