"""The steps that a run has saved: each is complete, or it does not count.

<run>/checkpoints/
    step-000020/        files as their owners wrote them, and complete.json, which lists each with
                        its size and crc32; of files that ranks wrote together their own lists
                        (`hybridrl.checkpoint.tensors.rank_manifest`) know the checksums
    step-000040/        without complete.json: one that is being written, or was when the run was
                        killed
    best.json           which step is the best, with `checkpoint.best`

`complete.json` is written when everything else is on the disk, and removed before anything else is:
so a folder that has one has all of it, unless the disk or a person has changed it since, which is
what the checksums are for. The rule needs no rename, so it holds on object stores too.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.keep_rule import KeepRule
from hybridrl.checkpoint.tensors.rank_manifest import (
    RankManifest,
    crc32_of,
    find_damage,
    find_missing_data,
    is_list,
    list_written_files,
    read_manifests,
)
from hybridrl.composition.secrets import has_redacted_password
from hybridrl.errors import ConfigError, StorageError
from hybridrl.run_files.run_paths import CHECKPOINTS_FOLDER
from hybridrl.run_files.run_reader import RunReader
from hybridrl.system.bounded_files import load_object
from hybridrl.system.locations import (
    Location,
    RemotePath,
    list_file_sizes,
    parse_location,
    remove_location,
    sync_directory,
    write_atomically,
)
from hybridrl.system.storage import explain_write_errors

COMPLETE_FILE = "complete.json"
"""The file that a step's folder has when it is complete."""
BEST_FILE = "best.json"
_STEP = re.compile(r"step-(\d{6,})")
_READER_THREADS = 4
"""Files that are read at once for their checksums, which use no Python lock."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its files, the metrics evaluated after it, and its time.

    Attributes:
        step: Its number.
        files: Size and crc32 of each file, by its name in the folder.
        figures: What was evaluated after the step.
        time: When it was completed, seconds since the epoch.
    """

    step: int
    files: dict[str, dict[str, int]]
    figures: dict[str, float] = field(default_factory=dict)
    time: float = 0.0

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file["size"] for file in self.files.values())

    @property
    def roles(self) -> list[str]:
        """Roles whose workers have written a part."""
        return sorted({name.split("/")[0] for name in self.files if "/" in name})


class CheckpointStore:
    """The steps that one run has saved.

    Args:
        path: The folder that they are in.
    """

    def __init__(self, path: Location) -> None:
        self.path = path
        self._known: dict[int, Checkpoint] = {}

    def at(self, step: int) -> Location:
        """Return the folder of a step, whether it is there or not."""
        return self.path / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Return the complete steps, the oldest first."""
        return [step for step in self._named() if (self.at(step) / COMPLETE_FILE).is_file()]

    def unfinished(self) -> list[int]:
        """Return the steps that are being written, or were when their run was killed."""
        return [step for step in self._named() if not (self.at(step) / COMPLETE_FILE).is_file()]

    def begin(self, step: int) -> Location:
        """Return an empty folder to write a step in.

        Raises:
            StorageError: if it cannot be made.
        """
        folder = self.at(step)
        with explain_write_errors(folder):
            self._remove(step)
            if isinstance(folder, Path):
                folder.mkdir(parents=True)
        return folder

    def complete(
        self, step: int, figures: Mapping[str, float] | None = None, parts: Iterable[str] = ()
    ) -> Location:
        """List what `begin` gave was filled with; from now on the step counts.

        Args:
            figures: What was evaluated after the step.
            parts: Folders that others have written in it.

        Raises:
            StorageError: if that cannot be written, or a part is not there.
        """
        folder = self.at(step)
        with explain_write_errors(folder):
            files = measure_files(folder, apart=list_manifest_files(folder))
            if missing := set(parts) - {name.partition("/")[0] for name in files}:
                raise StorageError(
                    f"{folder} has nothing of what the workers of `{min(missing)}` wrote there. "
                    "They and the driver must see the same files: set checkpoint.folder to a place "
                    "that all nodes share (memory:// is of one process)."
                )
            completed = Checkpoint(step, files, dict(figures or {}), time.time())
            text = json.dumps(vars(completed), indent=1)
            write_atomically(folder / COMPLETE_FILE, f"{text}\n".encode())
            if isinstance(self.path, Path):
                sync_directory(self.path)
        self._known[step] = completed
        return folder

    def discard(self, step: int) -> None:
        """Remove what was written of a step that could not be completed, as far as it can be."""
        try:
            self._remove(step)
        except OSError:
            return  # it does not count anyway, and the next job removes it

    def completed(self, step: int) -> Checkpoint:
        """Return what was noted of a complete step.

        Raises:
            OSError, ValueError: if its list cannot be read.
        """
        if step not in self._known:
            read = load_object(self.at(step) / COMPLETE_FILE)
            if not isinstance(read.get("files"), dict):
                raise ValueError("it lists no files")
            if not isinstance(read.get("step"), int):
                raise ValueError("it names no step")
            self._known[step] = Checkpoint(
                read["step"], read["files"], read.get("figures", {}), read.get("time", 0.0)
            )
        return self._known[step]

    def figures(self) -> dict[int, dict[str, float]]:
        """Return what was evaluated after each complete step; of damaged ones nothing."""
        found = {}
        for step in self.steps():
            try:
                found[step] = self.completed(step).figures
            except (OSError, ValueError):
                found[step] = {}
        return found

    def prune(self, rule: KeepRule) -> list[int]:
        """Remove the steps that the rule does not keep, note which is the best, and return the
        steps that were removed.

        Raises:
            StorageError: if one cannot be removed.
        """
        with explain_write_errors(self.path):
            steps = self.figures()
            best = rule.best_of(steps)
            if best is not None:
                noted = {"step": best, "folder": self.at(best).name, **steps[best]}
                write_atomically(self.path / BEST_FILE, f"{json.dumps(noted, indent=1)}\n".encode())
            outdated = sorted(steps.keys() - rule.kept(steps))
            for step in outdated:
                self._remove(step)
        return outdated

    def forget_after(self, step: int) -> None:
        """Remove later steps, and those that were never completed."""
        with explain_write_errors(self.path):
            for later in {*self.unfinished(), *(s for s in self._named() if s > step)}:
                self._remove(later)

    def fault(self, step: int, *, contents: bool = True) -> str:
        """Return what is wrong with a step's folder, naming the file; empty if nothing is.

        Args:
            contents: Read all of it; false: of tensors the sizes only.
        """
        folder = self.at(step)
        self._known.pop(step, None)
        try:
            completed = self.completed(step)
            if completed.step != step:
                return f"{folder} was written as step {completed.step}, and has been renamed since"
            listed = completed.files
            if not listed:
                return f"{folder / COMPLETE_FILE} lists no files"
            sizes = list_file_sizes(folder)
            for name, expected in listed.items():
                if name not in sizes:
                    return f"{folder / name} is missing"
                if sizes[name] != expected["size"]:
                    return f"{folder / name} has {sizes[name]} bytes instead of {expected['size']}"
            found = measure_files(folder, {name for name in listed if "crc32" not in listed[name]})
            for name, expected in listed.items():
                if found[name] != expected:
                    return f"{folder / name} is not what was written (its crc32 differs)"
            for role, lists in _read_manifests_by_role(folder):
                if fault := find_missing_data(folder / role, lists):
                    return fault
                if contents and (fault := find_damage(folder / role, lists)):
                    return fault
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{folder / COMPLETE_FILE} could not be read ({type(error).__name__}: {error})"
        return ""

    def newest(self, at_most: int | None = None) -> tuple[int | None, list[str]]:
        """Return the newest step that is whole, and a sentence about each newer one that is not.
        Of tensors at a URL only the sizes are compared here; whoever reads them checks the rest.

        Args:
            at_most: Leave out steps after this one.

        Raises:
            ConfigError: if there are steps and none of them is whole.
        """
        steps = [step for step in self.steps() if at_most is None or step <= at_most]
        faults: list[str] = []
        for step in reversed(steps):
            if not (fault := self.fault(step, contents=isinstance(self.path, Path))):
                return step, [f"{each}; the step before it is taken." for each in faults]
            faults.append(f"The checkpoint of step {step} is damaged: {fault}")
        if faults:
            raise ConfigError(
                f"No checkpoint in {self.path} can be resumed. {'. '.join(faults)}. Bring the "
                "files back from a copy, or start a new run in another folder."
            )
        return None, []

    def _named(self) -> list[int]:
        """Return the steps that have a folder."""
        try:
            paths = [p for p in self.path.iterdir() if isinstance(p, RemotePath) or p.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(step for path in paths if (step := parse_step_folder(path)) is not None)

    def _remove(self, step: int) -> None:
        """Remove a step, first what says that it is complete: the run may be killed in between."""
        self._known.pop(step, None)
        remove_location(self.at(step) / COMPLETE_FILE)
        remove_location(self.at(step))


def parse_step_folder(place: Location) -> int | None:
    """Return the step whose folder this is by its name; None if it is none."""
    found = _STEP.fullmatch(place.name)
    return int(found[1]) if found else None


def resolve_checkpoint_folder(run: Path, folder: str | None) -> Location:
    """Return where the steps of a run are.

    Args:
        folder: As `checkpoint.folder` says.
    """
    return run / CHECKPOINTS_FOLDER if folder is None else parse_location(folder)


def stored_steps_folder(run: Path) -> Location:
    """Return where the steps of a run are by its own settings.

    Raises:
        ConfigError: if that is a URL whose password is not written down, or no place.
    """
    checkpoint = RunReader(run).settings().get("checkpoint")
    folder = checkpoint.get("folder") if isinstance(checkpoint, dict) else None
    if isinstance(folder, str) and has_redacted_password(folder):
        raise ConfigError(
            f"The checkpoints of {run} are at {folder}, of which the password is not written "
            f"down. Give it again: resume=auto run.directory={run} checkpoint.folder=<URL>."
        )
    return resolve_checkpoint_folder(run, folder if isinstance(folder, str) else None)


def list_checkpoints(run: RunReader) -> tuple[list[dict[str, Any]], str]:
    """Return the complete checkpoints of a run, with `step`, and `bytes`, `time`, `figures` and
    `best`, or `damaged`; and where they are, if they are not in its folder. Nothing is listed of a
    URL: what stands in a folder must not send whoever looks at it to other machines."""
    try:
        folder = stored_steps_folder(run.path)
        found = [] if isinstance(folder, RemotePath) else _list_entries(CheckpointStore(folder))
    except (ConfigError, OSError) as error:
        return [], str(error)
    return found, "" if folder == run.path / CHECKPOINTS_FOLDER else str(folder)


def _list_entries(folders: CheckpointStore) -> list[dict[str, Any]]:
    try:
        best = load_object(folders.path / BEST_FILE).get("step")
    except (OSError, ValueError):
        best = None
    found: list[dict[str, Any]] = []
    for step in folders.steps():
        try:
            one = folders.completed(step)
            known = {"bytes": one.bytes, "time": one.time, "figures": one.figures}
            found.append({"step": step, **known, "best": step == best})
        except (OSError, ValueError, KeyError, TypeError):
            found.append({"step": step, "damaged": True})
    return found


def _read_manifests_by_role(folder: Location) -> Iterator[tuple[str, list[RankManifest]]]:
    """Yield the folders of a step with files that several ranks wrote, and their manifests."""
    names = (name.split("/") for name in list_file_sizes(folder))
    for role in sorted({name[0] for name in names if len(name) == 2 and is_list(name[1])}):
        yield role, read_manifests(folder / role)


def list_manifest_files(folder: Location) -> set[str]:
    """Return the files whose checksums ranks have listed.

    Raises:
        StorageError: if one of them is not written to its end.
    """
    names = set()
    for role, lists in _read_manifests_by_role(folder):
        if fault := find_missing_data(folder / role, lists):
            raise StorageError(f"The checkpoint in {folder} was not completed: {fault}.")
        names |= {f"{role}/{file}" for file in list_written_files(lists)}
    return names


def measure_files(folder: Location, apart: set[str]) -> dict[str, dict[str, int]]:
    """Return size and crc32 of every file but `COMPLETE_FILE`; of those in `apart` the size
    alone."""
    sizes = {name: size for name, size in list_file_sizes(folder).items() if name != COMPLETE_FILE}
    read = [name for name in sizes if name not in apart]
    with ThreadPoolExecutor(_READER_THREADS) as readers:
        sums = readers.map(lambda name: crc32_of(folder / name, [(0, sizes[name])]), read)
        crc32 = dict(zip(read, sums, strict=True))
    return {
        name: {"size": size} | ({"crc32": crc32[name]} if name in crc32 else {})
        for name, size in sizes.items()
    }
