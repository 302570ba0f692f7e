"""Writers of step metrics: always a JSON Lines file, and trackers if the settings name them.

Settings: `metrics`, a list of `tensorboard`, `wandb`, `mlflow` and `trackio`. A tracker is imported
when it is opened, so a run without it neither needs it nor waits for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hybridrl.batch.call_record import FigureCheck
from hybridrl.errors import ConfigError, MissingPackageError, pip_install, suggest_name
from hybridrl.run_files.run_directory import RunDirectory
from hybridrl.run_files.run_status import FAILED, FINISHED, INTERRUPTED
from hybridrl.system.storage import explain_write_errors, to_json

_TRACKER_PACKAGES = ("tensorboard", "wandb", "mlflow", "trackio")
"""Packages, by whose names they are asked for."""


class MetricWriter(Protocol):
    """A destination of step metrics. A step may be written twice: an evaluation adds to its
    metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, state: str = FINISHED) -> None:
        """Close the writer; `state` is how the run ended, see `run_status`."""


class JsonLinesWriter:
    """A file with one JSON object per line, `step` first and the other keys sorted; appends to
    `path`.

    A line is handed to the system whole and at once, so a killed run loses none. NaN and infinity
    are written as null.

    Raises:
        StorageError: the file cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with explain_write_errors(path):
            cut_short = _ends_mid_line(path)
            # Unbuffered: a failed line must not linger in a buffer and fail again on close.
            self._file = path.open("ab", buffering=0)
            if cut_short:
                self._file.write(b"\n")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        line = {"step": step, **{key: metrics[key] for key in sorted(metrics) if key != "step"}}
        data = (to_json(line) + "\n").encode()
        with explain_write_errors(self._path):
            while data:  # a nearly full disk takes part of a line and refuses the rest
                data = data[self._file.write(data) :]

    def close(self, state: str = FINISHED) -> None:
        with explain_write_errors(self._path):
            self._file.close()


class TensorBoardWriter:
    """A writer of TensorBoard event files under `directory`; view them with `tensorboard
    --logdir`."""

    def __init__(self, directory: Path) -> None:
        tensorboard = _import_tracker("tensorboard", "torch.utils.tensorboard")
        self._directory = directory
        with explain_write_errors(directory):
            self._writer = tensorboard.SummaryWriter(str(directory))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        with explain_write_errors(self._directory):
            for key, value in metrics.items():
                self._writer.add_scalar(key, float(value), step)
            self._writer.flush()

    def close(self, state: str = FINISHED) -> None:
        with explain_write_errors(self._directory):
            self._writer.close()


class WandbWriter:
    """A run in the Weights & Biases project `hybridrl`; `WANDB_*` variables work as usual."""

    def __init__(self, directory: Path, run_name: str, config: Mapping[str, Any]) -> None:
        wandb = _import_tracker("wandb")
        project = None if os.environ.get("WANDB_PROJECT") else "hybridrl"
        self._run = wandb.init(
            project=project, name=run_name, dir=str(directory), config=dict(config)
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({key: float(value) for key, value in metrics.items()}, step=step)

    def close(self, state: str = FINISHED) -> None:
        self._run.finish(exit_code=int(state != FINISHED))


class MLflowWriter:
    """A run in the MLflow experiment `hybridrl`; `MLFLOW_TRACKING_URI` and the like work."""

    def __init__(self, run_name: str, config: Mapping[str, Any]) -> None:
        mlflow = self._mlflow = _import_tracker("mlflow")
        if not any(map(os.environ.get, ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"))):
            mlflow.set_experiment("hybridrl")
        mlflow.start_run(run_name=run_name)
        mlflow.log_dict(dict(config), "config.json")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({key: float(v) for key, v in metrics.items()}, step=step)

    def close(self, state: str = FINISHED) -> None:
        status = {FINISHED: "FINISHED", INTERRUPTED: "KILLED"}.get(state, "FAILED")
        self._mlflow.end_run(status)


class TrackioWriter:
    """A run in the Trackio project `hybridrl`, on this machine's disk (`TRACKIO_DIR`), without a
    network unless `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` is set; `trackio show` shows it."""

    def __init__(self, run_name: str, config: Mapping[str, Any]) -> None:
        trackio = _import_tracker("trackio")
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or "hybridrl",
            name=run_name,
            config=dict(config),
            resume="allow",  # a run that goes on is the same run
            embed=False,
            auto_log_gpu=False,  # threads that ask devices beside the workers
            auto_log_cpu=False,
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({key: float(value) for key, value in metrics.items()}, step=step)

    def close(self, state: str = FINISHED) -> None:
        self._run.finish()


class MetricLog:
    """A writer that passes metrics to all writers of a run.

    Args:
        checked: Leaves out what cannot be written, and says so.
    """

    def __init__(self, writers: Sequence[MetricWriter], checked: FigureCheck) -> None:
        self._writers, self._checked = writers, checked

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics of a step, without what is no number or has no name."""
        metrics = self._checked.figures(metrics, "`Job.write`")
        for writer in self._writers:
            writer.write(step, metrics)


class RunSummary(dict[str, Any]):
    """The contents of `summary.json`, kept up to date while it goes on."""

    def begin(self) -> None:
        """Forget everything: the run begins, or goes on from a checkpoint, which brings its own."""
        self.clear()
        self |= {"steps": 0, "tokens_generated": 0, "seconds_train": 0.0}

    def record_metric(self, name: str, value: float) -> None:
        """Keep the first and the last value of a metric; of NaN, that it is not known."""
        known = None if math.isnan(value) else value
        if self.get(f"{name}_first") is None:
            self[f"{name}_first"] = known
        self[f"{name}_last"] = known

    def record_first_step(self, started: float) -> None:
        """Keep the seconds to the first optimizer step, when that is done."""
        self.setdefault("seconds_to_first_step", time.time() - started)

    def record_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep what a step adds."""
        self["steps"] = step
        self["tokens_generated"] += int(
            sum(value for name, value in metrics.items() if name.endswith("response/tokens"))
        )
        self["seconds_train"] += metrics["time/step"]
        for name in ("reward", "cost"):
            if (metric := f"{name}/mean") in metrics:
                self.record_metric(name, metrics[metric])


def parse_trackers(metrics: Any) -> list[str]:
    """Return the trackers that the setting `metrics` names, as a list."""
    return [metrics] if isinstance(metrics, str) else list(metrics or [])


def check_tracker_packages(names: Sequence[str]) -> None:
    """Check that the packages of these trackers are installed; open none.

    Raises:
        MissingPackageError: a tracker's package is not installed.
    """
    for name in names:
        if name in _TRACKER_PACKAGES and importlib.util.find_spec(name) is None:
            raise _missing_package_error(
                name, ModuleNotFoundError(f"No module named '{name}'", name=name)
            )


def open_metric_writers(
    names: Sequence[str], run_directory: RunDirectory, run_name: str, config: Mapping[str, Any]
) -> list[MetricWriter]:
    """Open `metrics.jsonl`, first, and the trackers named; `jsonl` may be named too.

    Raises:
        ConfigError: a name is unknown. Nothing has been opened.
        MissingPackageError: a tracker's package is not installed. All have been closed again.
        StorageError: a file cannot be written. All have been closed again.
    """
    openers: dict[str, Callable[[], MetricWriter]] = {
        "jsonl": lambda: JsonLinesWriter(run_directory.metrics_file),
        "tensorboard": lambda: TensorBoardWriter(run_directory.path / "tensorboard"),
        "wandb": lambda: WandbWriter(run_directory.path, run_name, config),
        "mlflow": lambda: MLflowWriter(run_name, config),
        "trackio": lambda: TrackioWriter(run_name, config),
    }
    for name in names:
        if name not in openers:
            raise ConfigError(
                f"`metrics` names `{name}`, and the writers are {', '.join(openers)}."
                + suggest_name(name, openers)
            )
    writers: list[MetricWriter] = []
    try:
        for name in dict.fromkeys(["jsonl", *names]):
            writers.append(openers[name]())
    except BaseException:
        for writer in writers:
            writer.close(FAILED)
        raise
    return writers


def _ends_mid_line(path: Path) -> bool:
    """Return whether the last line is incomplete because an earlier run was killed or ran out of
    disk."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _import_tracker(package: str, module: str | None = None) -> Any:
    """Import the module of a tracker, which has its package's name if nothing is said.

    Raises:
        MissingPackageError: names the package.
    """
    try:
        return importlib.import_module(module or package)
    except ImportError as error:
        raise _missing_package_error(package, error) from error


def _missing_package_error(package: str, error: ImportError) -> MissingPackageError:
    return MissingPackageError(
        f"`metrics` names `{package}`, which cannot be imported ({error}). "
        f"Install it with `{pip_install(package)}`, or take it off `metrics`."
    )
