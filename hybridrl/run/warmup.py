"""Supervised warm-up before reinforcement: a model that is never right gives nothing to
reinforce."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hybridrl.checkpoint.warm_model import has_warmup, load_warm_model, warm_copies, warm_folder
from hybridrl.config.schema import OptimizerConfig
from hybridrl.console.console_choice import progress_lines
from hybridrl.data.prompt_loader import PromptLoader
from hybridrl.trainers.role_spec import ACTOR_ROLE
from hybridrl.trainers.update_columns import loss_weights

if TYPE_CHECKING:
    from hybridrl.job.job import Job

_QUEUED_STEPS = 4
"""Steps queued ahead of the one that is waited for, so that workers never wait for the driver."""
_RATE_WARMUP_STEPS = 10


def warm_up(job: Job, progress: Callable[[int, Mapping[str, float]], None] | None = None) -> None:
    """Run `warmup.steps` supervised steps on a built-in task's reference responses, with an
    optimizer of their own. Afterwards the actor gets a fresh optimizer, and the models that start
    as copies of the actor become copies of the warmed-up one.

    Args:
        progress: Called after each step with its number (from 1) and metrics; None: it is shown as
            the progress of a `Job` is.
    """
    if job.examples is None or not has_warmup(job):
        return
    config, actor = job.config.warmup, job.groups[ACTOR_ROLE]
    progress = progress or _progress_lines(config.steps)
    # At a constant rate: a model annealed into a sharp minimum is thrown out of it by the first
    # steps of reinforcement.
    optimizer = OptimizerConfig(learning_rate=config.learning_rate, warmup_steps=_RATE_WARMUP_STEPS)
    actor.start_optimizer(optimizer, config.steps)
    loader = PromptLoader(job.examples, config.examples_per_step, job.config.run.seed)
    queue = []
    for step in range(config.steps + _QUEUED_STEPS):
        if step < config.steps:
            batch = next(loader)
            weighted = batch | loss_weights(batch, "token-mean")
            queue.append(actor.update_supervised(job.put(weighted)))
        if step >= _QUEUED_STEPS and queue:
            progress(step - _QUEUED_STEPS + 1, queue.pop(0).get())
    actor.start_optimizer(None, 0)
    if warm_copies(job):
        actor.save_model(str(warm_folder(job)), "float32").get()
    load_warm_model(job)


def _progress_lines(steps: int) -> Callable[[int, Mapping[str, float]], None]:
    view = progress_lines()
    view.phase("supervised warm-up")

    def progress(step: int, metrics: Mapping[str, float]) -> None:
        view.phase_progress(step, steps, f"loss {metrics['loss']:.3f}")

    return progress
