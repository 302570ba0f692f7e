"""The folder of a run as a report reads it: whatever is there, and nothing else is wanted."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hybridrl.checkpoint.store import BEST, StepFolders
from hybridrl.errors import ConfigError
from hybridrl.run_files.evaluation_log import EvaluationsFile
from hybridrl.run_files.run_status import state_of

MARKS = ("config.yaml", "metrics.jsonl")
"""A folder with one of these is a run's."""
LOG_BYTES = 1 << 20
"""So much of the end of each log is looked at."""
MOST_WARNINGS = 40
MOST_NAMED = 3
_WARNING = re.compile(r"\b(warning|error|exception|traceback)\b", re.I)
_CHANGING = re.compile(r"\d+")


class RunFolder:
    """One run.

    Args:
        path: Its folder; `runs/latest` will do.

    Raises:
        ConfigError: if that is none.
    """

    def __init__(self, path: Path) -> None:
        if not is_run(path):
            raise ConfigError(not_a_run(path))
        self.path = path.resolve()

    @property
    def name(self) -> str:
        """The folder's own."""
        return self.path.name

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    def settings(self) -> dict[str, Any]:
        """Of `config.yaml`, nested; empty if it is not there or cannot be read."""
        try:
            found = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, UnicodeError, yaml.YAMLError):
            return {}
        return found if isinstance(found, dict) else {}

    def settings_text(self) -> str:
        """`config.yaml` as it stands."""
        try:
            return (self.path / "config.yaml").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def summary(self) -> Mapping[str, Any]:
        """Of `summary.json`, which a run writes at its end."""
        return _object(self.path / "summary.json")

    def status(self) -> dict[str, Any]:
        """`state`, `why`, `began` and `ended`; a state that is not known is empty."""
        noted = _object(self.path / "status.json")
        state, why = state_of(self.path)
        return {
            "state": state,
            "why": why,
            "began": noted.get("began"),
            "ended": noted.get("ended"),
        }

    def evaluations(self) -> list[dict[str, Any]]:
        """See `run_files.evaluation_log`."""
        return EvaluationsFile(self.path).read()

    def data_report(self) -> Mapping[str, Any]:
        """Of `data-report.json`: the first row, and what the data repeats."""
        return _object(self.path / "data-report.json")

    def recoveries(self) -> list[dict[str, Any]]:
        """A row each time that workers were lost and the run went on."""
        return list(_lines(self.path / "recoveries.jsonl"))

    def bad_steps(self) -> list[dict[str, Any]]:
        """Steps whose numbers were not finite, and what was found in them."""
        return [
            {"step": _step_in(file.name), **_object(file)}
            for file in sorted((self.path / "bad-steps").glob("step-*.json"))
        ]

    def checkpoints(self) -> list[dict[str, Any]]:
        """Whole steps in the run's own folder: `step`, `bytes`, `time`, `figures`, `best`."""
        folders = StepFolders(self.path / "checkpoints")
        best = _object(self.path / "checkpoints" / BEST).get("step")
        found = []
        for step in folders.steps():
            try:
                one = folders.completed(step)
                size = one.bytes
            except (OSError, ValueError, KeyError, TypeError):
                found.append({"step": step, "damaged": True})
                continue
            found.append(
                {
                    "step": step,
                    "bytes": size,
                    "time": one.time,
                    "figures": one.figures,
                    "best": step == best,
                }
            )
        return found

    def failed_episodes(self) -> list[dict[str, Any]]:
        """Episodes kept in `failed/`, those of one kind that ended in the same line together:
        `files`, `line`, `times`, as `warnings` has them."""
        files: dict[str, list[str]] = {}
        for file in sorted((self.path / "failed").glob("*.json")):
            found = _object(file)
            last = str(found.get("failure")).rstrip().rpartition("\n")[2]
            line = f"episode failed ({found.get('kind')}): {last[:400]}"
            files.setdefault(line, []).append(f"failed/{file.name}")
        return [
            {"files": names[:MOST_NAMED], "line": line, "times": len(names)}
            for line, names in sorted(files.items(), key=lambda one: -len(one[1]))
        ]

    def warnings(self) -> list[dict[str, Any]]:
        """Lines of the ranks' logs that tell of something wrong, those alike but for their numbers
        together: `files`, `line` (the newest), `times`; the most frequent first."""
        times: Counter[str] = Counter()
        files: dict[str, list[str]] = {}
        newest: dict[str, str] = {}
        for file in sorted((self.path / "logs").glob("*.log")):
            for line in _end_of(file).splitlines():
                if _WARNING.search(line):
                    key = _CHANGING.sub("0", line)[:200]
                    times[key] += 1
                    newest[key] = line.strip()[:400]
                    if file.name not in files.setdefault(key, []):
                        files[key].append(file.name)
        return [
            {"files": files[key], "line": newest[key], "times": count}
            for key, count in times.most_common(MOST_WARNINGS)
        ]


def is_run(path: Path) -> bool:
    """Whether it is the folder of a run."""
    return any((path / name).is_file() for name in MARKS)


def runs_in(path: Path) -> list[Path]:
    """Folders of runs in a folder, the newest first, by when each began or was resumed; `latest` is
    one of them anyway."""
    try:
        folders = [one for one in path.iterdir() if not one.is_symlink() and is_run(one)]
    except OSError:
        return []
    return sorted(folders, key=lambda one: (_written(one), one.name), reverse=True)


def _written(run: Path) -> float:
    """When the settings of a run were written."""
    try:
        return (run / MARKS[0]).stat().st_mtime
    except OSError:
        return 0.0


def check_runs(path: Path) -> None:
    """Refuses a path that is neither the folder of a run nor one with runs in it."""
    if not is_run(path) and not runs_in(path):
        raise ConfigError(not_a_run(path))


def not_a_run(path: Path) -> str:
    """Why a path is no run's folder, and what to do."""
    if not path.exists():
        return f"{path} does not exist. Name the folder of a run, such as runs/latest."
    if not path.is_dir():
        return f"{path} is a file. Name the folder of a run, such as runs/latest."
    inner = runs_in(path)
    hint = (
        f"It holds {len(inner)} {'run' if len(inner) == 1 else 'runs'}; the newest is {inner[0]}."
        if inner
        else "Name one that a job has made, such as runs/latest."
    )
    return f"{path} is no run's folder: it has neither {MARKS[0]} nor {MARKS[1]}. {hint}"


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Those that are whole."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def _end_of(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - LOG_BYTES))
            return opened.read().decode(errors="replace")
    except OSError:
        return ""


def _step_in(name: str) -> int:
    found = re.search(r"step-(\d+)", name)
    return int(found[1]) if found else 0
