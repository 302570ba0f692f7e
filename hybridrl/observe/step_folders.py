"""The folders of whole steps that a run leaves: each is complete, or it does not count.

<run>/checkpoints/
    step-000020/        files as their owners wrote them, and complete.json, which lists each with
                        its size and crc32; of files that ranks wrote together their own lists
                        (`hybridrl.core.written`) know the checksums
    step-000040.part/   one that is being written, or was when the run was killed

A folder gets its name when everything in it is on the disk, so whoever finds `step-000020` finds
all of it, unless the disk or a person has changed it since: that is what the checksums are for.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hybridrl.config.resume import CHECKPOINTS, step_of
from hybridrl.core.written import LISTS, damage, lacking, read_lists
from hybridrl.errors import ConfigError, StorageError
from hybridrl.observe.storage import explain_write_errors

LIST = "complete.json"
_BLOCK_BYTES = 1 << 22
_READERS = 4
"""Files that are read at once for their checksums, which use no Python lock."""


class StepFolders:
    """Those of one run.

    Args:
        run: The run's folder.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / CHECKPOINTS

    def at(self, step: int) -> Path:
        """The folder of a step, whether it is there or not."""
        return self.path / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps whose folders have their names, the oldest first."""
        if not self.path.is_dir():
            return []
        found = [step_of(path) for path in self.path.iterdir() if path.is_dir()]
        return sorted(step for step in found if step is not None)

    def begin(self, step: int) -> Path:
        """An empty folder to write a step in.

        Raises:
            StorageError: if it cannot be made.
        """
        part = self._part(step)
        with explain_write_errors(part):
            _remove(part)
            part.mkdir(parents=True)
        return part

    def complete(self, step: int) -> Path:
        """Lists what `begin` gave was filled with, and gives it its name.

        Raises:
            StorageError: if that cannot be written.
        """
        part, folder = self._part(step), self.at(step)
        with explain_write_errors(part):
            files = _contents(part, apart=_written_together(part))
            text = json.dumps({"step": step, "files": files}, indent=1)
            with (part / LIST).open("w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            _sync(part)
            _remove(folder)
            part.rename(folder)
            _sync(self.path)
        return folder

    def discard(self, step: int) -> None:
        """Removes what has been written of a step that could not be completed."""
        shutil.rmtree(self._part(step), ignore_errors=True)

    def prune(self, keep: int) -> None:
        """Leaves the newest steps only, `keep` of them, at least 1."""
        with explain_write_errors(self.path):
            for step in self.steps()[: -max(1, keep)]:
                _remove(self.at(step))

    def forget_after(self, step: int) -> None:
        """Removes later steps, and those that were never completed."""
        if not self.path.is_dir():
            return
        with explain_write_errors(self.path):
            for path in list(self.path.iterdir()):
                found = step_of(path)
                if path.suffix == ".part" or (found is not None and found > step):
                    _remove(path)

    def fault(self, step: int) -> str:
        """What is wrong with a step's folder, naming the file; empty if nothing is. Reads all of
        it."""
        folder = self.at(step)
        try:
            listed = json.loads((folder / LIST).read_text(encoding="utf-8"))["files"]
            missing = [name for name in listed if not (folder / name).is_file()]
            if missing:
                return f"{folder / missing[0]} is missing"
            for name, expected in listed.items():
                size = (folder / name).stat().st_size
                if size != expected["size"]:
                    return f"{folder / name} has {size} bytes instead of {expected['size']}"
            found = _contents(folder, apart={n for n, e in listed.items() if "crc32" not in e})
            for name, expected in listed.items():
                if found[name] != expected:
                    return f"{folder / name} is not what was written (its crc32 differs)"
            for role in _roles(folder):
                lists = read_lists(role)
                if fault := lacking(role, lists) or damage(role, lists):
                    return fault
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{folder / LIST} could not be read ({type(error).__name__}: {error})"
        return ""

    def newest(self, at_most: int | None = None) -> tuple[int | None, list[str]]:
        """The newest step that is whole, and a sentence about each newer one that is not.

        Args:
            at_most: Leaves out steps after this one.

        Raises:
            ConfigError: if there are steps and none of them is whole.
        """
        steps = [step for step in self.steps() if at_most is None or step <= at_most]
        faults = []
        for step in reversed(steps):
            if not (fault := self.fault(step)):
                return step, [f"{each}; the step before it is taken." for each in faults]
            faults.append(f"The checkpoint of step {step} is damaged: {fault}")
        if faults:
            raise ConfigError(
                f"No checkpoint in {self.path} can be resumed. {'. '.join(faults)}. Bring the "
                "files back from a copy, or start a new run in another folder."
            )
        return None, []

    def _part(self, step: int) -> Path:
        return self.at(step).with_name(f"{self.at(step).name}.part")


def _roles(folder: Path) -> list[Path]:
    """Folders of a step with files that several ranks wrote."""
    return sorted({path.parent for path in folder.glob(f"*/{LISTS}")})


def _written_together(folder: Path) -> set[str]:
    """Files whose checksums ranks have listed.

    Raises:
        StorageError: if one of them is not written to its end.
    """
    names = set()
    for role in _roles(folder):
        lists = read_lists(role)
        if fault := lacking(role, lists):
            raise StorageError(f"The checkpoint in {folder} was not completed: {fault}.")
        names |= {f"{role.name}/{file}" for written in lists for file in written.headers}
    return names


def _contents(folder: Path, apart: set[str]) -> dict[str, dict[str, int]]:
    """Size and crc32 of every file but the list itself; of those in `apart` the size alone."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / LIST)
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    read = [name for name in files if name not in apart]
    with ThreadPoolExecutor(_READERS) as readers:
        sums = dict(zip(read, readers.map(_crc32, map(files.__getitem__, read)), strict=True))
    return {
        name: {"size": path.stat().st_size} | ({"crc32": sums[name]} if name in sums else {})
        for name, path in files.items()
    }


def _crc32(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            found = zlib.crc32(block, found)
    return found


def _remove(folder: Path) -> None:
    """In two steps, so that a run that is killed in between leaves no folder that looks whole."""
    if not folder.exists():
        return
    if folder.suffix != ".part":
        aside = folder.with_name(f"{folder.name}.removed.part")
        shutil.rmtree(aside, ignore_errors=True)
        folder = folder.rename(aside)
    shutil.rmtree(folder)


def _sync(folder: Path) -> None:
    """The names in a folder, too, are on the disk."""
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)
