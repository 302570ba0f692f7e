"""The actor as it is after warm-up: other models begin as copies of it, also where the run
is resumed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from hybridrl.composition.model_start import ACTOR_ROLE
from hybridrl.errors import ConfigError
from hybridrl.system.locations import Location, copy_files, list_file_sizes, remove_location
from hybridrl.system.storage import explain_write_errors

if TYPE_CHECKING:
    from hybridrl.controller import WorkerGroup
    from hybridrl.job.job import Job

FOLDER = "warm_model"
"""Its folder in that of the run."""


def load_warm_model(job: Job, but: Collection[str] = (), steps: Location | None = None) -> None:
    """Load the warmed-up actor into the models that begin as copies of it.

    Args:
        but: Roles that have gone on from there.
        steps: Where the checkpoint is that the run goes on from. Beside it is the folder that
            warm-up left, where this run has none of its own.

    Raises:
        ConfigError: if the folder that warm-up left them is gone.
    """
    folder, copies = warm_folder(job), warm_copies(job, but)
    if copies and steps is not None and not folder.is_dir():
        kept = [place / FOLDER for place in (steps, steps.parent) if (place / FOLDER).is_dir()]
        if kept:
            part = folder.with_name(f".{FOLDER}.part")
            with explain_write_errors(part):
                remove_location(part)
                copy_files(kept[0], part)
                part.rename(folder)
    if copies and not folder.is_dir():
        raise ConfigError(
            f"{folder} is missing: the actor as it was after warm-up, of which other models of the "
            "run are copies. Bring it back from a copy, or start a new run."
        )
    for group in copies:
        group.load_weights(str(folder))


def save_warm_model(job: Job, steps: Location) -> None:
    """Put what warm-up left beside checkpoints that are not in the run's folder, once.

    Raises:
        StorageError: if it cannot be written.
    """
    folder = warm_folder(job)
    with explain_write_errors(steps):
        if folder.is_dir() and list_file_sizes(folder) != list_file_sizes(steps / FOLDER):
            copy_files(folder, steps / FOLDER)


def has_warmup(job: Job) -> bool:
    """Return whether a run of this job begins with a warm-up."""
    return bool(
        job.config.warmup.steps
        and job.examples is not None
        and job.trainer_class.TRAINS
        and ACTOR_ROLE in job.groups
    )


def warm_folder(job: Job) -> Path:
    return (job.directory.path / FOLDER).absolute()


def warm_copies(job: Job, but: Collection[str] = ()) -> list[WorkerGroup]:
    found = [
        job.groups[role]
        for role, spec in job.roles.items()
        if spec.is_copy(role, job.config) and role not in but
    ]
    # With LoRA the actor is its own reference.
    return [group for group in found if group is not job.groups[ACTOR_ROLE]]
