"""`evaluations.json` of a run: everything that was evaluated, and how.

{"format": 1, "evaluations": [{"step", "date", "model", "model_step", "versions", "sets": {NAME: {
    "prompts", "data", "sampling", "correct_at", "samples": its Parquet file, from the run's folder,
    "metrics": {NAME: {"value", "standard_error", "low", "high", "prompts",
                       "difference": {"value", "low", "high", "p", "test", "baseline"}}}}}}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.run_files.run_paths import EVALUATIONS as NAME
from hybridrl.system.bounded_files import load_json
from hybridrl.system.storage import replace_file, to_json

_FORMAT_VERSION = 1


class EvaluationLog:
    """The log of all evaluations of a run.

    Args:
        folder: The run's.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME

    def read(self) -> list[dict[str, Any]]:
        """Return all evaluations in the order of steps; none if there is no file, or no valid
        one."""
        try:
            return _select_valid_entries(load_json(self.path))
        except (OSError, ValueError):
            return []

    def add(self, evaluation: Mapping[str, Any]) -> None:
        """Add an evaluation, replacing the sets that it shares with one of the same step. Readers
        see the file before or after, never half of it.

        Raises:
            StorageError: if it cannot be written.
        """
        step, entries = evaluation["step"], self.read()
        same = next((entry for entry in entries if entry["step"] == step), {})
        sets = {**same.get("sets", {}), **evaluation["sets"]}
        others = [entry for entry in entries if entry["step"] != step]
        self._write([*others, {**evaluation, "sets": sets}])

    def forget_after(self, step: int) -> None:
        """Remove the evaluations of later steps.

        Raises:
            StorageError: if it cannot be written.
        """
        entries = self.read()
        kept = [entry for entry in entries if entry["step"] <= step]
        if len(kept) < len(entries):
            self._write(kept)

    def _write(self, entries: list[dict[str, Any]]) -> None:
        entries.sort(key=lambda entry: entry["step"])
        with replace_file(self.path) as part:
            written = to_json({"format": _FORMAT_VERSION, "evaluations": entries}, indent=1)
            part.write_text(written + "\n", encoding="utf-8")


def load_named_evaluations(setting: str, path: str) -> tuple[Path, list[dict[str, Any]]]:
    """Return the folder and the evaluations of a run, given its folder or its `evaluations.json`.

    Raises:
        ConfigError: if there are none.
    """
    place = Path(path).expanduser()
    file = place / NAME if place.is_dir() else place
    if not file.is_file():
        raise ConfigError(
            f"{setting}={path}: there is no file {file}. Name the folder of a run that has "
            f"evaluated something, or its {NAME}."
        )
    try:
        entries = _select_valid_entries(load_json(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}={path}: {file} cannot be read: {error}.") from error
    if not entries:
        raise ConfigError(f"{setting}={path}: {file} holds no evaluations. Name another run.")
    return file.parent, entries


def find_latest_by_set(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the newest evaluation of each set, with its `step`."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        found |= {name: {**one, "step": entry["step"]} for name, one in entry["sets"].items()}
    return found


def _select_valid_entries(found: Any) -> list[dict[str, Any]]:
    entries = found.get("evaluations") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        return []
    return [
        entry
        for entry in entries
        if isinstance(entry, dict)
        and isinstance(entry.get("step"), int)
        and isinstance(entry.get("sets"), dict)
        and all(_is_valid_set(one) for one in entry["sets"].values())
    ]


def _is_valid_set(found: Any) -> bool:
    metrics = found.get("metrics", {}) if isinstance(found, dict) else None
    return isinstance(metrics, dict) and all(isinstance(one, dict) for one in metrics.values())
