"""ModelWorker: the base of every worker that holds models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.checkpoint.engine_state.state_files import NUMBERS_FILE
from hybridrl.checkpoint.engine_state.state_saver import EngineStateSaver
from hybridrl.checkpoint.engine_state.training_state import load_training_state
from hybridrl.checkpoint.tensors.rank_manifest import SaveResult
from hybridrl.controller import ONE_TO_ALL, Worker, WorkerContext, transfer
from hybridrl.engine.training_snapshot import TrainingSnapshot
from hybridrl.models.model_loading import load_tokenizer, read_stored_dtype
from hybridrl.parallel import process_group
from hybridrl.system.content_cache import ContentCache
from hybridrl.system.device_traits import synchronize_device
from hybridrl.system.dtypes import DTYPES
from hybridrl.system.locations import parse_location
from hybridrl.workers.training_engines import ModelSource

if TYPE_CHECKING:
    from hybridrl.batch.batch import Batch
    from hybridrl.engine.train_engine import LossFunction, TrainEngine
    from hybridrl.layout.rank_mesh import MeshCoordinate


SNAPSHOT_FOLDER = "stage-start"
"""Of a saved state: the copy that the worker had in memory."""


class ModelWorker(Worker):
    """A worker that holds models. While it runs a call, its group is torch.distributed's whole
    world (see `process_group`) and its model is on the device, from which it is offloaded when
    another role needs the memory. Its coordinates are those of its model's mesh.

    Attributes:
        model_engine: Of its model; None if it has none that is partitioned over ranks.
    """

    model_engine: TrainEngine | None = None

    def coordinates(self) -> Mapping[str, MeshCoordinate]:
        engine = self.model_engine
        return super().coordinates() if engine is None else engine.mesh.coordinates

    @property
    def attention_length(self) -> float:
        engine = self.model_engine
        return super().attention_length if engine is None else engine.attention_length

    @property
    def shares_prompts(self) -> bool:
        engine = self.model_engine
        return engine is not None and engine.shares_prompts

    def enter(self) -> None:
        process_group.enter_world(self.context.role)
        if (engine := self.model_engine) is not None:
            engine.onload()

    def leave(self) -> None:
        if (engine := self.model_engine) is None:
            return
        if "train" in self.record.phases:  # those records are shown
            self.record.choices += engine.take_said()
        if engine.fault is not None:
            self.record.faults.append(engine.fault)
            engine.fault = None

    def report_cache(self, cache: ContentCache) -> None:
        """Report lookups and hits since the last report, and once why nothing is written any
        more."""
        self.report(**cache.take_counts())
        self.record.remarks += cache.faults
        cache.faults.clear()

    @property
    def takes_memory(self) -> bool:
        return True

    def make_room(self) -> None:
        if (engine := self.model_engine) is not None:
            engine.offload()


class TrainedModelWorker(ModelWorker):
    """A worker whose model is trained and saved.

    Args:
        source: The model.
    """

    model_engine: TrainEngine

    def __init__(self, context: WorkerContext, source: ModelSource) -> None:
        super().__init__(context)
        self._source = source
        self._snapshot: TrainingSnapshot | None = None

    def counters(self) -> dict[str, int]:
        """Return the counters that `load_training_state` gives back."""
        return {}

    def beside(self) -> dict[str, Mapping[str, Any]]:
        """Return further JSON files of the state, by name."""
        return {}

    @transfer(ONE_TO_ALL)
    def load_weights(self, folder: str) -> None:
        """Load the weights of a model folder that this model has too."""
        self.model_engine.load(Path(folder))

    @transfer(ONE_TO_ALL)
    def save_model(self, folder: str, dtype: str | None = None) -> None:
        """Write model and tokenizer as a Hugging Face folder; `dtype` None: in the precision of
        `model.save_dtype`."""
        dtype = dtype or self._source.save_dtype or read_stored_dtype(self._source.path)
        self.model_engine.save(Path(folder), DTYPES[dtype], self._source.file_bytes)
        if self.context.rank == 0:
            self._write_tokenizer(Path(folder))

    @transfer(ONE_TO_ALL)
    def save_state(self, folder: str) -> None:
        """Write weights, optimizer and counters, for `load_state` on any number of ranks. The
        folder must hold no state yet."""
        self._save_snapshot(folder)
        self._saver.save(parse_location(folder), self.counters(), self.beside())

    @transfer(ONE_TO_ALL)
    def start_saving(self, folder: str, copy: str | None = None) -> None:
        """Start saving as `save_state` does, but return when a copy is made. It is written in the
        background, after earlier ones, and also to a second folder if possible."""
        self._save_snapshot(folder)
        second = None if copy is None else parse_location(copy)
        self._saver.start(parse_location(folder), self.counters(), self.beside(), second)

    @transfer(ONE_TO_ALL)
    def finish_saving(self, wait: bool = True) -> SaveResult | None:
        """Return the bytes and seconds of what `start_saving` has written; None while it is under
        way, unless `wait` is set."""
        return self._saver.finish(wait)

    @transfer(ONE_TO_ALL)
    def load_state(self, folder: str) -> None:
        """Load a saved state, to continue where the worker stopped."""
        self.load_snapshot(folder)
        load_training_state(self.model_engine, parse_location(folder))

    @transfer(ONE_TO_ALL)
    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next updates."""
        self.model_engine.set_learning_rate(rate)

    @transfer(ONE_TO_ALL)
    def keep_snapshot(self) -> None:
        """Keep a copy of the training state in memory, in place of the one before. Checkpoints have
        both."""
        self._snapshot = None  # its memory is for the new one
        self._snapshot = TrainingSnapshot(self.model_engine)

    @transfer(ONE_TO_ALL)
    def restore_snapshot(self) -> None:
        """Bring the training state back to the copy in memory."""
        assert self._snapshot is not None  # `keep_snapshot` comes first
        self._snapshot.restore()

    def load_snapshot(self, folder: str) -> None:
        """Load the copy that was in memory when a state was saved, if there was one. The state
        itself is to be loaded next."""
        kept = parse_location(folder) / SNAPSHOT_FOLDER
        if (kept / NUMBERS_FILE).is_file():
            load_training_state(self.model_engine, kept)
            self._snapshot = TrainingSnapshot(self.model_engine)

    def _update(self, batch: Batch, loss: LossFunction, **options: Any) -> dict[str, float]:
        """Take one optimizer step; see `TrainEngine.update`."""
        with self.phase("train"):
            metrics = self.model_engine.update(batch, loss, **options)
            synchronize_device(self.model_engine.device)
        return metrics

    def _save_snapshot(self, folder: str) -> None:
        if self._snapshot is not None:
            with self._snapshot.in_place():
                self._snapshot_saver.save(parse_location(folder) / SNAPSHOT_FOLDER, {}, {})

    def close(self) -> None:
        self._saver.close()

    @cached_property
    def _snapshot_saver(self) -> EngineStateSaver:
        return EngineStateSaver(self.model_engine, None, self._source.file_bytes)

    @cached_property
    def _saver(self) -> EngineStateSaver:
        return EngineStateSaver(self.model_engine, self._write_tokenizer, self._source.file_bytes)

    def _write_tokenizer(self, folder: Path) -> None:
        load_tokenizer(self._source.tokenizer).save_pretrained(folder)
