"""Supervised steps before reinforcement: a model that is never right gives nothing to reinforce."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hybridrl.config.schema import OptimizerConfig
from hybridrl.console.run_console import progress_lines
from hybridrl.data.prompt_loader import PromptLoader
from hybridrl.errors import ConfigError
from hybridrl.system.locations import Location, copy_files, remove, sizes_below
from hybridrl.system.storage import explain_write_errors
from hybridrl.trainers.role_spec import ACTOR
from hybridrl.trainers.update_columns import loss_weights

if TYPE_CHECKING:
    from hybridrl.controller import WorkerGroup
    from hybridrl.job.job import Job

AHEAD = 4
"""Steps queued ahead of the one that is waited for, so that workers never wait for the driver."""
RATE_WARMUP_STEPS = 10
FOLDER = "warm_model"
"""Of a run: the actor as it is after warm-up, where other models begin as copies of it."""


def warm_up(job: Job, progress: Callable[[int, Mapping[str, float]], None] | None = None) -> None:
    """Runs `warmup.steps` supervised steps on a built-in task's own answers, with an optimizer of
    their own; the actor's starts afresh after them, and the models that begin as copies of the
    actor begin as copies of what it is then.

    Args:
        progress: Called after each step with its number (from 1) and metrics; None: it is shown as
            the progress of a `Job` is.
    """
    if not warms_up(job):
        return
    config, actor = job.config.warmup, job.groups[ACTOR]
    progress = progress or _progress_lines(config.steps)
    # At a constant rate: a model annealed into a sharp minimum is thrown out of it by the first
    # steps of reinforcement.
    optimizer = OptimizerConfig(learning_rate=config.learning_rate, warmup_steps=RATE_WARMUP_STEPS)
    actor.start_optimizer(optimizer, config.steps)
    loader = PromptLoader(job.examples, config.examples_per_step, job.config.run.seed)
    queue = []
    for step in range(config.steps + AHEAD):
        if step < config.steps:
            batch = next(loader)
            weighted = batch | loss_weights(batch, "token-mean")
            queue.append(actor.update_supervised(job.put(weighted)))
        if step >= AHEAD and queue:
            progress(step - AHEAD + 1, queue.pop(0).get())
    actor.start_optimizer(None, 0)
    if _copies(job):
        actor.save_model(str(_folder(job)), "float32").get()
    load_copies(job)


def _progress_lines(steps: int) -> Callable[[int, Mapping[str, float]], None]:
    view = progress_lines()
    view.phase("supervised warm-up")

    def progress(step: int, metrics: Mapping[str, float]) -> None:
        view.phase_progress(step, steps, f"loss {metrics['loss']:.3f}")

    return progress


def load_copies(job: Job, but: Collection[str] = (), steps: Location | None = None) -> None:
    """Has the models that begin as copies of the warmed-up actor begin so, also in a run that is
    resumed.

    Args:
        but: Roles that have gone on from there.
        steps: Where the checkpoint is that the run goes on from. Beside it is the folder that
            warm-up left, where this run has none of its own.

    Raises:
        ConfigError: if the folder that warm-up left them is gone.
    """
    folder, copies = _folder(job), _copies(job, but)
    if copies and steps is not None and not folder.is_dir():
        kept = [place / FOLDER for place in (steps, steps.parent) if (place / FOLDER).is_dir()]
        if kept:
            part = folder.with_name(f".{FOLDER}.part")
            with explain_write_errors(part):
                remove(part)
                copy_files(kept[0], part)
                part.rename(folder)
    if copies and not folder.is_dir():
        raise ConfigError(
            f"{folder} is missing: the actor as it was after warm-up, of which other models of the "
            "run are copies. Bring it back from a copy, or start a new run."
        )
    for group in copies:
        group.load_weights(str(folder))


def keep_copies(job: Job, steps: Location) -> None:
    """Puts what warm-up left beside checkpoints that are not in the run's folder, once.

    Raises:
        StorageError: if it cannot be written.
    """
    folder = _folder(job)
    with explain_write_errors(steps):
        if folder.is_dir() and sizes_below(folder) != sizes_below(steps / FOLDER):
            copy_files(folder, steps / FOLDER)


def warms_up(job: Job) -> bool:
    """Whether a run of this job begins with a warm-up."""
    return bool(
        job.config.warmup.steps
        and job.examples is not None
        and job.trainer_class.TRAINS
        and ACTOR in job.groups
    )


def _folder(job: Job) -> Path:
    return (job.directory.path / FOLDER).absolute()


def _copies(job: Job, but: Collection[str] = ()) -> list[WorkerGroup]:
    found = [
        job.groups[role]
        for role, spec in job.roles.items()
        if spec.is_copy(role, job.config) and role not in but
    ]
    # With LoRA the actor is its own reference.
    return [group for group in found if group is not job.groups[ACTOR]]
