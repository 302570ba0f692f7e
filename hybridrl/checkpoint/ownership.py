"""Ownership of a `checkpoint.folder` outside the run's folder.

`<checkpoint.folder>/owner.json` names the run that writes there, and the run's own folder has the
same note. A `RunLock` cannot do this at a URL; this needs no more than small files that are
replaced whole. A job that has died leaves its note, with which the same run goes on.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.errors import ConfigError, StorageError
from hybridrl.run_files.run_lock import describe_this_process, is_process_dead
from hybridrl.system.locations import Location, remove_location, write_atomically
from hybridrl.system.storage import explain_write_errors

OWNER_FILE = "owner.json"


class FolderOwnership:
    """A claim of one run on a folder of checkpoints.

    Args:
        folder: As `checkpoint.folder` names it.
        run: The run's own folder.
    """

    def __init__(self, folder: Location, run: Path) -> None:
        self._folder, self._run = folder, run.absolute()
        self._note: dict[str, Any] = {}

    def claim(self, *, resumes: bool) -> None:
        """Claim the folder for this run, if no other run owns it. A job that died on this machine
        before its run had a note, or a checkpoint, owns nothing.

        Args:
            resumes: A run that has no note goes on with what is there, whoever wrote it: it has
                lost its own folder, or the machine with it.

        Raises:
            ConfigError: if it is another run's; names that run.
            StorageError: if that cannot be noted.
        """
        with explain_write_errors(self._folder / OWNER_FILE):
            owner, mine = _read_note(self._folder / OWNER_FILE), _read_note(self._run / OWNER_FILE)
        is_free = owner is None or (mine is None and (resumes or is_process_dead(owner, silent=0)))
        is_mine = owner is not None and mine is not None and mine["run"] == owner["run"]
        if owner is not None and not is_free and (not is_mine or self._is_copied(owner)):
            raise self._refused(owner)
        run = secrets.token_hex(8) if mine is None else mine["run"]
        self._note = describe_this_process() | {"run": run, "folder": str(self._run)}
        for place in self._places:
            with explain_write_errors(place):
                write_atomically(place, json.dumps(self._note, indent=1).encode())

    def check(self) -> None:
        """Fail if the folder is owned by another run; call this before anything is written there.

        Raises:
            StorageError: if another run, or another job of this one, has taken the folder since.
        """
        with explain_write_errors(self._folder / OWNER_FILE):
            owner = _read_note(self._folder / OWNER_FILE)
        if owner is not None and owner != self._note:
            raise StorageError(
                f"{self._folder} has been taken over by {_describe_owner(owner)}, which goes on "
                "from what was there. This job ends, so that the two do not mix their checkpoints. "
                "Give each run a checkpoint.folder of its own."
            )

    def is_taken(self) -> bool:
        """Return whether another run owns the folder now; False also where it cannot be reached."""
        try:
            return _read_note(self._folder / OWNER_FILE) not in (None, self._note)
        except OSError:
            return False

    def release(self) -> None:
        """Give up a folder without checkpoints, if it can be reached."""
        with contextlib.suppress(OSError):
            if not self.is_taken() and not CheckpointStore(self._folder).steps():
                for place in self._places:
                    remove_location(place)

    def _is_copied(self, owner: dict[str, Any]) -> bool:
        """Return whether the run's folder, with its note, is a copy of one in which a job still
        runs, as far as this machine knows."""
        here = owner["machine"] == describe_this_process()["machine"]
        return here and owner["folder"] != str(self._run) and not is_process_dead(owner, silent=0)

    @property
    def _places(self) -> tuple[Location, Location]:
        return self._folder / OWNER_FILE, self._run / OWNER_FILE

    def _refused(self, owner: dict[str, Any]) -> ConfigError:
        return ConfigError(
            f"checkpoint.folder={self._folder} is that of {_describe_owner(owner)}, and each run "
            "needs one of its own. Give another. To begin from its checkpoints, set "
            f"fork={self._folder}; to go on with it, resume={self._folder} and an empty "
            f"run.directory. If that run is gone for good, remove {self._folder / OWNER_FILE}."
        )


def _describe_owner(owner: dict[str, Any]) -> str:
    return f"the run in {owner['folder']} (process {owner['pid']} on {owner['host']})"


def _read_note(file: Location) -> dict[str, Any] | None:
    """Return the note in a file; None if there is no complete one."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    known = {*describe_this_process(), "run", "folder"}
    return found if isinstance(found, dict) and known <= found.keys() else None
