"""The folder of one run and the files that the driver writes there.

runs/2026-03-01_09-30-00-addition/
    config.yaml      the resolved settings
    metrics.jsonl    one line per step
    steps.jsonl      what every rank did in each step, and when; see `recorded_steps`
    samples/         step-000012.parquet: prompts, answers, rewards;
                     eval-math-step-000020.parquet: those of an evaluation, by its set
    evaluations.json what was evaluated, how, and how sure it is; see `evaluation_log`
    tokens/          step-000012.parquet: of some samples, each token
    bad-steps/       what steps learned from whose numbers were not finite
    logs/            one file per rank
    model/           the trained model
    placement.json   which role lives on which devices; `placement=file` reads it
    cluster.json     these devices and their nodes
    data-report.json the first row as the model reads it; which prompts are there twice, or nearly,
                     also among those to evaluate on
    checkpoints/     complete steps to resume from; see `CheckpointStore`
    lock.json        which job has the folder, while it runs; see `run_lock`
    status.json      what has become of the run; see `run_status`
    summary.json
    report.html      the run as a page; see `report`
runs/latest          a link to the newest run
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.errors import ConfigError, StorageError
from hybridrl.run_files import run_paths as names
from hybridrl.run_files.evaluation_log import EvaluationLog
from hybridrl.run_files.metric_reader import find_end_of_step
from hybridrl.system.storage import (
    DISK_FULL_ERRNOS,
    explain_write_errors,
    format_write_error,
    replace_file,
    to_json,
)

if TYPE_CHECKING:
    import pyarrow

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}


class RunDirectory:
    """The folder of one run: its paths, and the writing of its small files. `create`
    and `at` make one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / names.LOGS
        self.samples = path / names.SAMPLES
        self.tokens = path / names.TOKENS
        self.model = path / names.MODEL
        self.metrics_file = path / names.METRICS
        self.config_file = path / names.SETTINGS
        self.summary_file = path / names.SUMMARY
        self._latest: Path | None = None

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @classmethod
    def create(cls, root: Path, name: str) -> RunDirectory:
        """Make the folder `<root>/<date>_<time>-<name>/`. Call `point_latest` when it is worth
        looking at.

        Raises:
            ConfigError: `root` cannot be written, or is in the folder of another run; the message
                names `run.root`.
            StorageError: the disk is full.
        """
        root = Path(root)
        _check_not_inside_run("run.root", root, root / name)
        stem = f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{_sanitize_folder_name(name)}"
        _check_latest_link(root / names.LATEST_LINK)
        try:
            root.mkdir(parents=True, exist_ok=True)
            directory = cls(_make_unique_folder(root, stem))
            directory._make_folders()
        except OSError as error:
            raise _build_write_error("run.root", root, error) from error
        directory._latest = root / names.LATEST_LINK
        return directory

    @classmethod
    def at(cls, path: Path, *, resumes: bool = False) -> RunDirectory:
        """Use exactly `path` as the folder; make it if it is missing, and keep the files in it.

        Args:
            resumes: What a run has made there is that of this one.

        Raises:
            ConfigError: `path` cannot be written, holds what another run has made, or is in its
                folder; the message names `run.directory`.
            StorageError: the disk is full.
        """
        directory = cls(Path(path))
        try:
            if not resumes:
                directory._refuse_results()
            if not directory.config_file.is_file():  # otherwise a run has begun here before
                _check_not_inside_run("run.directory", directory.path, directory.path)
            directory._make_folders()
            # An existing folder may be readable only: learn it now, not after the first step.
            with tempfile.TemporaryFile(dir=directory.path) as probe:
                probe.write(b"x")
        except OSError as error:
            raise _build_write_error("run.directory", directory.path, error) from error
        return directory

    def point_latest(self) -> None:
        """Point `<root>/latest` at this run, if `create` made it."""
        if self._latest is not None:
            _replace_latest_link(self._latest, self.path.name)

    @classmethod
    def check(cls, directory: str | None, root: str, resumes: bool) -> None:
        """Check that the folder could be made or opened; make nothing.

        Raises:
            ConfigError: as they do.
        """
        setting, path = ("run.root", root) if directory is None else ("run.directory", directory)
        run = cls(Path(path))
        if directory is None:
            _check_not_inside_run(setting, run.path, run.path / "new")
        elif not resumes:
            run._refuse_results()
        if not run.config_file.is_file():
            _check_not_inside_run(setting, run.path, run.path)
        there = next(
            folder for folder in (run.path, *run.path.absolute().parents) if folder.exists()
        )
        try:
            if not there.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            raise _build_write_error(setting, run.path, error) from error

    def close_to_others(self) -> None:
        """Restrict the folder to this user, whatever the permissions of its files.

        Raises:
            ConfigError: the folder is somebody else's.
        """
        try:
            self.path.chmod(0o700)
        except PermissionError as error:
            raise ConfigError(
                f"run.private=true: {self.path} belongs to another user, who alone can keep others "
                "out. Name a new folder by run.directory."
            ) from error

    def write_text(self, name: str, text: str) -> None:
        """Write a small file of the run, such as the resolved settings, in place of an earlier one.
        It is on the disk when this returns."""
        with replace_file(self.path / name) as part, part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a small file of the run as JSON; NaN and infinity become null."""
        self.write_text(name, to_json(content, indent=2) + "\n")

    def forget_summary(self) -> None:
        """Remove the summary of an earlier job of this run, which goes on."""
        with explain_write_errors(self.summary_file):
            self.summary_file.unlink(missing_ok=True)

    def write_samples(
        self, step: int, table: pyarrow.Table, tokens: pyarrow.Table | None = None
    ) -> Path:
        """Write the samples of one step to `samples/step-<6 digits>.parquet` and return the file.
        The token columns of its first samples go to `tokens/` under the same name."""
        if tokens is not None:
            with explain_write_errors(self.tokens):
                self.tokens.mkdir(exist_ok=True)
            _write_parquet(self.tokens / f"step-{step:06d}.parquet", tokens)
        return _write_parquet(self.samples / f"step-{step:06d}.parquet", table)

    def write_evaluated(self, name: str, step: int, table: pyarrow.Table) -> Path:
        """Write the samples of a set's evaluation to `samples/eval-<name>-step-<6 digits>.parquet`
        and return the file."""
        return _write_parquet(self.samples / f"eval-{name}-step-{step:06d}.parquet", table)

    def write_bad_step(self, step: int, table: pyarrow.Table, found: Mapping[str, Any]) -> Path:
        """Write the samples of a step with non-finite numbers to `bad-steps/step-<6
        digits>.parquet`, and what was found in them to a JSON file beside it; return the Parquet
        file."""
        path = self.path / "bad-steps" / f"step-{step:06d}.parquet"
        with explain_write_errors(path):
            path.parent.mkdir(exist_ok=True)
        self.write_json(f"bad-steps/step-{step:06d}.json", found)
        return _write_parquet(path, table)

    def forget_after(self, step: int) -> None:
        """Remove the figures and samples of later steps, which are about to be made
        again. `metrics.jsonl` may be open for appending.

        Raises:
            StorageError: if that fails.
        """
        with explain_write_errors(self.path):
            for file in (self.metrics_file, self.path / names.STEPS):
                if file.is_file():
                    os.truncate(file, find_end_of_step(file, step))
            folders = (self.samples, self.tokens)
            for path in (path for folder in folders for path in folder.glob("*step-*")):
                number = re.match(r"(?:eval-[\w-]+-)?step-(\d+)", path.name)
                if number and int(number[1]) > step:
                    path.unlink()
        EvaluationLog(self.path).forget_after(step)

    def _refuse_results(self) -> None:
        """Refuse a folder with results of another run, which would be mixed with this one's."""
        if found := self._results():
            raise ConfigError(
                f"run.directory={self.path} holds an earlier run (it has {found[0].name}), and "
                "the two would be mixed up. Give another folder, remove or rename this one, or "
                "leave run.directory out for a new one under run.root. To go on from its last "
                "checkpoint, if it has any, set resume=auto; to train on from its model, set "
                f"model.path={self.model} as well."
            )

    def _results(self) -> list[Path]:
        """Return the files that show that a run has made steps here. A run that ended before its
        first step leaves none."""
        found = [path for path in (self.summary_file, self.model) if path.exists()]
        if self.metrics_file.is_file() and self.metrics_file.stat().st_size:
            found.insert(0, self.metrics_file)
        return found

    def _make_folders(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        self.samples.mkdir(exist_ok=True)


def make_checkpoint_folder(folder: Path) -> None:
    """Make a folder of checkpoints outside the run's folder.

    Raises:
        ConfigError: it cannot be made; the message names `checkpoint.folder`.
        StorageError: the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _build_write_error("checkpoint.folder", folder, error) from error


def _check_not_inside_run(setting: str, named: Path, path: Path) -> None:
    """Refuse a folder inside the folder of another run. A run's folder is named, copied and removed
    as one, and `checkpoints/` in it is pruned."""
    for folder in path.resolve().parents:
        run = RunDirectory(folder)
        if run.config_file.is_file() and (run._results() or (folder / names.LOCK_FILE).is_file()):
            raise ConfigError(
                f"{setting}={named} is in {folder}, the folder of an earlier run. Give a folder "
                f"that is in no other run's, such as {folder.parent / 'new'}. To go on with that "
                f"run, set resume={folder}; for a new run from its checkpoints, fork={folder}."
            )


def _write_parquet(path: Path, table: pyarrow.Table) -> Path:
    from pyarrow import parquet  # 0.3 s, wanted only by runs that keep samples

    with replace_file(path) as part, part.open("wb") as file:
        parquet.write_table(table, file)
    return path


def _sanitize_folder_name(name: str) -> str:
    """Return the name with letters, digits, `.`, `_`, `=`, `+` and `-` only, at most 80
    characters."""
    return re.sub(r"[^\w.=+-]+", "-", name).strip(".-")[:80] or "run"


def _make_unique_folder(root: Path, stem: str) -> Path:
    # mkdir either makes the folder or fails, so two runs of one second never share it.
    for number in range(1, 10_000):
        path = root / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise StorageError(f"{root} holds 9,999 runs called {stem}. Set `run.name` to another name.")


def _check_latest_link(link: Path) -> None:
    if link.exists() and not link.is_symlink():
        raise ConfigError(
            f"{link} is a file or folder of its own, and every run makes it a link to the newest "
            "run. Rename it, or set `run.root` to another folder."
        )


def _replace_latest_link(link: Path, target: str) -> None:
    """Point `link` at `target`; whoever follows it sees the old run or the new one."""
    new_link = link.with_name(f".latest-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        new_link.symlink_to(target)
    except OSError as error:
        if error.errno in _NO_LINKS:  # some mounted disks have no links; the run needs none
            return
        raise StorageError(format_write_error(link, error)) from error
    with explain_write_errors(link):
        new_link.replace(link)


def _build_write_error(setting: str, folder: Path, error: OSError) -> ConfigError | StorageError:
    sentence = format_write_error(folder, error, setting=f"`{setting}`")
    return StorageError(sentence) if error.errno in DISK_FULL_ERRNOS else ConfigError(sentence)
