"""The folder of a run as everybody reads it: whatever is there, and nothing else is wanted.

A folder may come from a stranger. Only what is in it is read, no links, pipes or devices, and files
only up to a size (`hybridrl.system.bounded_files`). What cannot be read counts as missing, and
`RunReader.faults` says why.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hybridrl.errors import ConfigError
from hybridrl.run_files import run_paths as names
from hybridrl.run_files.evaluation_log import EvaluationLog
from hybridrl.run_files.metric_reader import MetricReader
from hybridrl.run_files.recorded_steps import NEWEST_STEPS_BYTES, RecordedStep, read_recorded_steps
from hybridrl.run_files.run_status import load_status
from hybridrl.system.bounded_files import (
    load_object,
    load_yaml,
    open_regular,
    parse_json,
    read_end,
    read_text,
)

if TYPE_CHECKING:
    from pyarrow import Table

_T = TypeVar("_T")
_RUN_MARKERS = (names.SETTINGS, names.METRICS)
"""A folder with one of these is a run's."""
_LOG_TAIL_BYTES = 1 << 20
"""So much of the end of each log is looked at."""
MOST_LOGS = 256
"""Logs that are looked at, those that were written to last."""
MOST_TABLE_BYTES = 4 << 30
"""Largest table of samples, in memory."""
_MAX_WARNINGS = 40
MOST_NAMED = 3
_WARNING = re.compile(r"\b(warning|error|exception|traceback)\b", re.I)
_DIGITS = re.compile(r"\d+")


class RunReader:
    """One run.

    Args:
        path: Its folder; `runs/latest` will do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._metrics = MetricReader(self.path / names.METRICS)
        self._reading = threading.Lock()

    @property
    def name(self) -> str:
        """The folder's own."""
        return self.path.name

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of each step; see `MetricReader.rows`. Reads only what is new."""
        with self._reading:
            return self._metrics.rows()

    def steps(self) -> list[RecordedStep]:
        """Return the newest steps that the run has recorded; see `read_recorded_steps`."""
        return read_recorded_steps(self.path, NEWEST_STEPS_BYTES)

    def settings(self) -> dict[str, Any]:
        """Return what `config.yaml` holds, nested; empty if it cannot be read."""
        found: Any = self._read(load_yaml, names.SETTINGS, {})
        return found if isinstance(found, dict) else {}

    def settings_text(self) -> str:
        """Return `config.yaml` as it stands."""
        return self._read(read_text, names.SETTINGS, "")

    def summary(self) -> Mapping[str, Any]:
        """Return `summary.json`, which a run writes at its end."""
        return self._object(names.SUMMARY)

    def status(self) -> dict[str, Any]:
        """See `load_status`."""
        return load_status(self.path)

    def evaluations(self) -> list[dict[str, Any]]:
        """See `evaluation_log`."""
        return EvaluationLog(self.path).read()

    def data_report(self) -> Mapping[str, Any]:
        """Return `data-report.json`: the first row, and what the data repeats."""
        return self._object(names.DATA_REPORT)

    def devices(self) -> set[int]:
        """Return the devices that roles live on, as far as `placement.json` can be read."""
        try:
            roles = self._object(names.PLACEMENT)["roles"].values()
            return {int(device) for role in roles for device in role["devices"]}
        except (ValueError, KeyError, TypeError, AttributeError):
            return set()

    def recoveries(self) -> list[dict[str, Any]]:
        """Return a row for each time that workers were lost and the run went on."""
        return list(_objects(self._read(read_text, names.RECOVERIES, "")))

    def bad_steps(self) -> list[dict[str, Any]]:
        """Return the steps whose numbers were not finite, and what was found in them."""
        return [
            {"step": _parse_step(file.name), **self._object(file)}
            for file in self.files(names.BAD_STEPS, "step-*.json")
        ]

    def failed_episodes(self) -> list[dict[str, Any]]:
        """Return the episodes kept in `failed/`, those of one kind that ended in the same line
        together: `files`, `line`, `times`, as `warnings` has them."""
        files: dict[str, list[str]] = {}
        for file in self.files(names.FAILED, "*.json"):
            found = self._object(file)
            last = str(found.get("failure")).rstrip().rpartition("\n")[2]
            line = f"episode failed ({found.get('kind')}): {last[:400]}"
            files.setdefault(line, []).append(f"failed/{file.name}")
        return [
            {"files": alike[:MOST_NAMED], "line": line, "times": len(alike)}
            for line, alike in sorted(files.items(), key=lambda one: -len(one[1]))
        ]

    def warnings(self) -> list[dict[str, Any]]:
        """Return lines of the ranks' logs that tell of something wrong, those alike but for their
        numbers together: `files`, `line` (the newest), `times`; the most frequent first, after the
        files of the run that could not be read."""
        times: Counter[str] = Counter()
        files: dict[str, list[str]] = {}
        newest: dict[str, str] = {}
        logs = sorted(self.files(names.LOGS, "*.log"), key=lambda one: one.lstat().st_mtime)
        for file in sorted(logs[-MOST_LOGS:]):
            for line in _read_log_tail(file).splitlines():
                if _WARNING.search(line):
                    key = _DIGITS.sub("0", line)[:200]
                    times[key] += 1
                    newest[key] = line.strip()[:400]
                    if file.name not in files.setdefault(key, []):
                        files[key].append(file.name)
        faults = [{"files": [n], "line": why, "times": 1} for n, why in self.faults().items()]
        return faults + [
            {"files": files[key], "line": newest[key], "times": count}
            for key, count in times.most_common(_MAX_WARNINGS)
        ]

    def faults(self) -> dict[str, str]:
        """Return why files of the run cannot be read, by their names."""
        found = {}
        for name in names.FILES:
            file = self.path / name
            try:
                if name.endswith(".yaml"):
                    load_yaml(file)
                elif name.endswith(".json"):
                    load_object(file)
                else:
                    open_regular(file).close()
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                found[name] = f"{name} could not be read: {error}"
        return found

    def files(self, folder: str, pattern: str) -> list[Path]:
        """Return the files of a folder of the run, by their names; none of a folder elsewhere."""
        place = self.path / folder
        return [] if place.is_symlink() else sorted(place.glob(pattern))

    def _object(self, file: str | Path) -> dict[str, Any]:
        return self._read(load_object, file, {})

    def _read(self, load: Callable[[Path], _T], file: str | Path, missing: _T) -> _T:
        try:
            return load(self.path / file)
        except (OSError, ValueError):
            return missing


def read_table(file: Path) -> Table:
    """Return a table of samples.

    Raises:
        OSError, ValueError: if it cannot be read, is no regular file, or too large.
    """
    from pyarrow import ArrowException, parquet  # 0.3 s

    try:
        with open_regular(file) as opened:
            table = parquet.ParquetFile(opened)
            groups = range(table.metadata.num_row_groups)
            if (
                sum(table.metadata.row_group(one).total_byte_size for one in groups)
                > MOST_TABLE_BYTES
            ):
                raise OSError(f"{file} is larger than what is read")
            return table.read()
    except ArrowException as error:
        raise ValueError(f"{file} is no whole table: {error}") from error


def open_run(path: Path) -> RunReader:
    """Return the run in a folder.

    Raises:
        ConfigError: if there is none.
    """
    if not is_run_folder(path):
        raise ConfigError(explain_not_a_run(path))
    return RunReader(path)


def is_run_folder(path: Path) -> bool:
    """Return whether the folder holds a run's `config.yaml` or `metrics.jsonl`."""
    return any((path / name).is_file() for name in _RUN_MARKERS)


def list_runs(path: Path) -> list[Path]:
    """List the folders of runs in a folder, the newest first, by when each began or was
    resumed; `latest` is one of them anyway."""
    try:
        folders = [one for one in path.iterdir() if not one.is_symlink() and is_run_folder(one)]
    except OSError:
        return []
    return sorted(folders, key=lambda one: (_written(one), one.name), reverse=True)


def _written(run: Path) -> float:
    """When the settings of a run were written."""
    try:
        return (run / _RUN_MARKERS[0]).stat().st_mtime
    except OSError:
        return 0.0


def check_runs(path: Path) -> None:
    """Refuse a path that is neither the folder of a run nor one with runs in it."""
    if not is_run_folder(path) and not list_runs(path):
        raise ConfigError(explain_not_a_run(path))


def explain_not_a_run(path: Path) -> str:
    """Return the sentence that says why a path is no run folder, and what to name instead."""
    if not path.exists():
        return f"{path} does not exist. Name the folder of a run, such as runs/latest."
    if not path.is_dir():
        return f"{path} is a file. Name the folder of a run, such as runs/latest."
    inner = list_runs(path)
    hint = (
        f"It holds {len(inner)} {'run' if len(inner) == 1 else 'runs'}; the newest is {inner[0]}."
        if inner
        else "Name one that a job has made, such as runs/latest."
    )
    return (
        f"{path} is no run's folder: it has neither {_RUN_MARKERS[0]} nor {_RUN_MARKERS[1]}. {hint}"
    )


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The lines that are whole."""
    for line in text.splitlines():
        try:
            found = parse_json(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def _read_log_tail(file: Path) -> str:
    try:
        return read_end(file, _LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _parse_step(name: str) -> int:
    found = re.search(r"step-(\d+)", name)
    return int(found[1]) if found else 0
