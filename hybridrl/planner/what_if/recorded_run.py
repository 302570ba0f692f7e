"""A run that was recorded: its settings, its devices, and its last steps as a graph."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from hybridrl.batch.call_record import CallRecord
from hybridrl.composition.load import load_run_config
from hybridrl.config.changed import Setting, apply_changes
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, DataError
from hybridrl.placement import Placement
from hybridrl.planner.step.graph_replay import WorkGraph
from hybridrl.planner.step.step_calls import SampleLengths
from hybridrl.planner.what_if.recorded_graph import build_recorded_graph
from hybridrl.run_files.recorded_steps import RecordedStep
from hybridrl.run_files.run_paths import CLUSTER, INITIAL_MODEL, MODEL, PLACEMENT, SETTINGS
from hybridrl.run_files.run_reader import RunReader
from hybridrl.system.bounded_files import parse_json, read_text
from hybridrl.system.cluster_spec import ClusterSpec

_WARMUP_STEPS = 1
"""Steps at the beginning that are left out where there are others: everything is done for the first
time in them."""

_T = TypeVar("_T")

_BUILT_MODEL_FOLDERS = (INITIAL_MODEL, MODEL)
"""Where the model of a run is that was made on the spot: as it began, and as it ended."""


def load_recorded_job(folder: Path) -> tuple[Config, ClusterSpec, Placement]:
    """Load the settings of a run, its devices and where its roles lived. The settings include those
    that a search for the placement chose, which config.yaml does not have, and the folder of a
    model that was made on the spot.

    Raises:
        ConfigError: if the folder lacks one of them, or they cannot be read.
    """
    settings_file, cluster_file, placement_file = _find_job_files(folder)
    config = load_run_config(settings_file)
    if config.model.path is None:
        built = [folder / name for name in _BUILT_MODEL_FOLDERS]
        made = next((one for one in built if one.is_dir()), built[0])
        config = replace(config, model=replace(config.model, path=str(made)))
    cluster = _read(cluster_file, ClusterSpec.from_json)
    placement, settings = _read(placement_file, _placement_and_settings)
    try:
        return apply_changes(config, settings), cluster, placement
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{placement_file} has settings that cannot be: {error}") from None


def _find_job_files(folder: Path) -> list[Path]:
    files = [folder / name for name in (SETTINGS, CLUSTER, PLACEMENT)]
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"{folder} has no {file.name}. Name the folder of a run, such as runs/latest, "
                "which has made a step."
            )
    return files


@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder records it: settings, cluster, placement and steps.

    Attributes:
        folder: Its own.
        config: Its settings, with the folder of its model where that was made.
        cluster: Its devices.
        placement: Where its roles lived.
        steps: Of its last start.
    """

    folder: Path
    config: Config
    cluster: ClusterSpec
    placement: Placement
    steps: Sequence[RecordedStep]

    @classmethod
    def at(cls, folder: Path, last: int = 10) -> RecordedRun:
        """Load a run from its folder.

        Args:
            last: So many of its newest steps at most.

        Raises:
            ConfigError: if the folder lacks something.
        """
        _find_job_files(folder)
        try:
            steps = RunReader(folder).steps()
        except DataError as error:
            raise ConfigError(str(error)) from error
        config, cluster, placement = load_recorded_job(folder)
        kept = steps[_WARMUP_STEPS:][-last:] or steps
        return cls(folder, config, cluster, placement, kept)

    @cached_property
    def graph(self) -> WorkGraph:
        """Build the graph of these steps, one right after the other; the time between them, such as
        that of an evaluation, is left out."""
        begin, end = self.steps[0].begin, self.steps[0].begin
        records = []
        for step in self.steps:
            records += [_shifted(record, step.begin - end) for record in step.records]
            end += step.end - step.begin
        return build_recorded_graph(records, begin, end, self._ahead)

    @cached_property
    def held(self) -> float:
        """Return the number of steps in the graph: with `placement.staleness` it begins earlier,
        with the samples that its first step learned from."""
        took = sum(step.end - step.begin for step in self.steps)
        starts = [
            record.start - self._ahead.get(record.host, 0.0)
            for record in self.steps[0].records
            if record.host >= 0
        ]
        before = max(0.0, self.steps[0].begin - min(starts, default=math.inf))
        return len(self.steps) * (1 + before / took)

    @property
    def _ahead(self) -> Mapping[int, float]:
        return self.steps[-1].ahead

    @cached_property
    def seconds(self) -> float:
        """Return the mean seconds of these steps."""
        return statistics.fmean(step.end - step.begin for step in self.steps)

    @cached_property
    def lengths(self) -> SampleLengths:
        """Return the lengths of the samples of these steps."""
        config = self.config
        numbers = {step.step for step in self.steps}
        rows = [r for r in RunReader(self.folder).rows() if r["step"] in numbers]
        response = _mean(rows, "response/length_mean", config.rollout.max_tokens)
        longest = _mean(rows, "response/length_max", response)
        if observed := _mean(rows, "response/observed_tokens", 0.0):  # between the model's turns
            share = 1 + observed / max(1.0, _mean(rows, "response/tokens", observed))
            response, longest = response * share, longest * share
        samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
        tokens = sum(
            one.tokens for step in self.steps for one in step.records if one.phases.get("generate")
        )
        prompt = tokens / samples / len(self.steps) - response
        if prompt < 1:
            prompt = config.data.max_prompt_tokens
        return SampleLengths(prompt, max(1.0, response), max(1.0, longest))


def _mean(rows: Sequence[Mapping[str, Any]], name: str, otherwise: float) -> float:
    found = [row[name] for row in rows if name in row]
    return statistics.fmean(found) if found else otherwise


def _read(file: Path, parse: Callable[[str], _T]) -> _T:
    try:
        return parse(read_text(file))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no text in UTF-8.") from error
    except (ConfigError, OSError) as error:
        raise ConfigError(f"{file}: {error}") from error


def _placement_and_settings(text: str) -> tuple[Placement, list[Setting]]:
    """Parse a placement.json: the placement, and the settings that a search chose with it, which
    config.yaml does not have."""
    placement = Placement.from_json(text)
    return placement, list(dict(parse_json(text).get("settings", {})).items())


def _shifted(record: CallRecord, earlier: float) -> CallRecord:
    spans = [s._replace(start=s.start - earlier, end=s.end - earlier) for s in record.spans]
    return replace(record, start=record.start - earlier, end=record.end - earlier, spans=spans)
