"""A saver of a TrainEngine's training state, either blocking or in the background.

Every rank writes the boxes that it was dealt, at their places of files that all ranks share, and
none waits for another. See `plan_state_files` for what stands where.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from hybridrl.checkpoint.engine_state.async_saving import BackgroundTask, StagingBuffer
from hybridrl.checkpoint.engine_state.state_files import (
    MOMENTS_STEM,
    NUMBERS_FILE,
    OPTIMIZER,
    WEIGHTS_STEM,
    EngineStateFiles,
    list_trained_parameters,
    plan_state_files,
    read_local_state,
)
from hybridrl.checkpoint.tensors import rank_manifest as written
from hybridrl.checkpoint.tensors.file_plan import (
    MAX_FILE_BYTES,
    FilePart,
    FilePlan,
    plan_files,
)
from hybridrl.checkpoint.tensors.rank_manifest import (
    RankManifest,
    SaveResult,
    WrittenBox,
    WrittenHeader,
    manifest_path,
)
from hybridrl.checkpoint.tensors.tensor_reader import TensorInFiles, index_file_name
from hybridrl.checkpoint.tensors.tensor_writer import (
    make_header_entries,
    make_written_box,
    slice_part,
    write_headers,
    write_parts,
    write_remote_file,
    write_small_file,
)
from hybridrl.checkpoint.tensors.write_errors import convert_write_errors
from hybridrl.engine.model_folder import write_model_config
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.errors import StorageError
from hybridrl.layout.boxes import box_shape
from hybridrl.models.stored_tensors import CARRIED, limit_file_bytes
from hybridrl.system.locations import Location

JsonNumbers = Mapping[str, Any]
"""What becomes a JSON file."""


class EngineStateSaver:
    """A saver that writes the state of one engine to a new folder at each save.

    Who writes what is worked out the first time, which is collective, and holds for the life of the
    engine; so does the memory for a copy.

    Args:
        tokenizer: Writes a tokenizer's files to a folder; None: the model has none.
        file_bytes: Largest file, unless one tensor is larger.
    """

    def __init__(
        self,
        engine: TrainEngine,
        tokenizer: Callable[[Path], None] | None = None,
        file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._file_bytes = file_bytes
        self._background = BackgroundTask()

    def save(
        self, folder: Location, counters: JsonNumbers, beside: Mapping[str, JsonNumbers]
    ) -> SaveResult:
        """Write the state without copying it first.

        Args:
            folder: One that all ranks see, and that holds no state yet.
            counters: For `load_training_state` to give back.
            beside: Further JSON files, by name.

        Raises:
            StorageError: if a file cannot be written; names it.
        """
        self._background.settle()
        self._check_unused(folder)
        self._engine.gather_anew()  # as a run does that goes on from here
        write = self._writing(counters, beside)
        sources = read_local_state(self._engine, self._files.weights)
        return write(folder, _values(self.parts, sources), lambda: False)

    def start(
        self,
        folder: Location,
        counters: JsonNumbers,
        beside: Mapping[str, JsonNumbers],
        copy: Location | None = None,
    ) -> None:
        """Copy the state and write the copy on another thread, after earlier writes; see `save`.

        Args:
            copy: Where it is then written a second time, if that can be done.
        """
        self._background.settle()  # until then the memory for the copy is in use
        self._check_unused(folder)
        self._engine.gather_anew()  # as a run does that goes on from here
        write = self._writing(counters, beside)
        copied = self._copy.fill(read_local_state(self._engine, self._files.weights))

        def work(stop: Callable[[], bool]) -> SaveResult:
            copied()
            saved = write(folder, self._copied(), stop)
            if copy is None:
                return saved
            try:
                again = write(copy, self._copied(), stop)
            except StorageError as error:  # the state is on the disk all the same
                return saved._replace(copy_fault=str(error.__cause__ or error))
            return saved._replace(copy_seconds=again.seconds)

        self._background.start(work)

    def finish(self, wait: bool) -> SaveResult | None:
        """Return the result of the save in the background; None while it is under way and `wait` is
        false. Raises as `save` does."""
        return self._background.result(wait)

    def close(self) -> None:
        """Cancel the save in the background."""
        self._background.close()

    def _check_unused(self, folder: Location) -> None:
        mine = manifest_path(folder, self._engine.mesh.place)
        if mine.is_file():
            raise StorageError(
                f"{folder} holds a state already, of which {mine.name} is a part. Give each save a "
                "folder of its own."
            )

    def _writing(
        self, counters: JsonNumbers, beside: Mapping[str, JsonNumbers]
    ) -> Callable[[Location, Iterable[Tensor], Callable[[], bool]], SaveResult]:
        """Return a function that writes the values of `parts` to a folder; all else that it
        writes is captured now."""
        parts, steps = self.parts, self._steps()
        small, headers = dict[str, bytes](), dict[str, WrittenHeader]()
        if self._engine.mesh.place == 0:
            numbers = {NUMBERS_FILE: self._numbers(counters), **beside}
            small = {name: json.dumps(value).encode() for name, value in numbers.items()}
            small |= self._description | self._indices
            headers = {f: h for plan in self._plans for f, h in make_header_entries(plan).items()}

        def write(
            folder: Location, values: Iterable[Tensor], stop: Callable[[], bool]
        ) -> SaveResult:
            begin = time.perf_counter()
            for name, content in small.items():
                write_small_file(folder / name, content)
            own: dict[str, WrittenHeader] = {}
            if isinstance(folder, Path):
                boxes = self._write_together(folder, values, stop)
            else:
                own, boxes = write_remote_file(folder, self._engine.mesh.place, parts, values, stop)
            mine = manifest_path(folder, self._engine.mesh.place)
            write_small_file(mine, RankManifest(boxes, headers, steps, own).to_json().encode())
            return SaveResult(sum(part.size for part in parts), time.perf_counter() - begin)

        return write

    def _write_together(
        self, folder: Path, values: Iterable[Tensor], stop: Callable[[], bool]
    ) -> list[WrittenBox]:
        """Write the values of `parts` to the files that all ranks share."""
        with convert_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        if self._engine.mesh.place == 0:
            for plan in self._plans:
                write_headers(folder, plan)
        sums = write_parts(folder.__truediv__, self.parts, values, stop)
        return list(map(make_written_box, self.parts, sums))

    @cached_property
    def _files(self) -> EngineStateFiles:
        return plan_state_files(self._engine)

    @cached_property
    def _plans(self) -> tuple[FilePlan, FilePlan]:
        """The file plans of weights and of moments."""
        layout, files, place = self._engine.layout(), self._files, self._engine.mesh.place
        stored, stem = files.weights.all_tensors(layout), files.weights.stem
        weights = plan_files(
            stored,
            place,
            torch.float32,
            limit_file_bytes(stem, self._file_bytes),
            stem,
            files.weights.dtypes(),
        )
        moments = plan_files(files.moments, place, torch.float32, self._file_bytes, MOMENTS_STEM)
        return weights, moments

    @cached_property
    def parts(self) -> tuple[FilePart, ...]:
        """The parts of files that this rank writes. Collective when first read."""
        weights, moments = self._plans
        return weights.parts + moments.parts

    @cached_property
    def _copy(self) -> StagingBuffer:
        changing = [part for part in self.parts if not part.source.tensor.startswith(CARRIED)]
        return StagingBuffer(changing, self._engine.device)

    def _copied(self) -> Iterator[Tensor]:
        """Values of `parts`: copies, and what never changes from the files in which it is."""
        copies, carried = iter(self._copy.values), self._files.weights.carried_tensors()
        for part in self.parts:
            source = carried.get(part.source.tensor)
            yield next(copies) if source is None else slice_part(part, source)

    @cached_property
    def _description(self) -> dict[str, bytes]:
        """The small files that make the folder a model folder, if it is one; they do not change."""
        if self._files.weights.stem == WEIGHTS_STEM:
            return {}
        with TemporaryDirectory() as name:
            folder = Path(name)
            source = self._files.weights.source
            write_model_config(self._engine.model.inner, folder, torch.float32, source)
            if self._tokenizer is not None:
                self._tokenizer(folder)
            return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    @cached_property
    def _indices(self) -> dict[str, bytes]:
        """The index files of weights and of moments, where several files hold them."""
        plans = zip((self._files.weights.stem, MOMENTS_STEM), self._plans, strict=True)
        return {index_file_name(stem): plan.index.encode() for stem, plan in plans if plan.index}

    def _steps(self) -> dict[str, float | None]:
        """Return the optimizer's step count of each parameter of whose state this rank writes a
        part; 0 where it keeps no count."""
        states, trained = self._engine.optimizer.state, list_trained_parameters(self._engine)
        forms, found = self._files.trained, dict[str, float | None]()
        mine = {part.source.tensor for part in self.parts}
        for name, parameter in trained.items():
            tensors = forms[name].tensors
            if not tensors or any(f"{name}/{kind}" in mine for kind in tensors):
                state = states.get(parameter)
                found[name] = float(state.get("step", 0)) if state else None
        return found

    def _numbers(self, counters: JsonNumbers) -> dict[str, Any]:
        return {
            OPTIMIZER: self._engine.optimizer_config.name,
            "schedule": self._engine.schedule.last_epoch,
            "skipped_in_a_row": self._engine.skipped_in_a_row,
            "counters": dict(counters),
            written.CARRIED: list(self._files.weights.carried),
        }


def _values(
    parts: Iterable[FilePart], sources: Mapping[str, Tensor | TensorInFiles | None]
) -> Iterator[Tensor]:
    for part in parts:
        source = sources[part.source.tensor]
        if source is None:
            yield torch.zeros(box_shape(part.box))
        else:
            yield slice_part(part, source).to(part.entry.dtype)
