"""What a person should know before the first step: sizes, and which role lives where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridrl.job.job import Job


def overview(job: Job, plan: Sequence[str]) -> str:
    """A few lines: the derived sizes, and the plan's own lines of roles, devices and memory."""
    config, cluster = job.config, job.executor.cluster
    prompts, per_prompt = config.data.prompts_per_step, config.rollout.samples_per_prompt
    held_out = len(job.held_out) if job.held_out is not None else 0
    held_out //= 2 if job.trainer_class.DATA == "pairs" else 1
    samples = f"{prompts} prompts x {per_prompt} samples = {prompts * per_prompt} samples"
    of_step = {
        "prompts": samples,
        "examples": f"{prompts} examples",
        "pairs": f"{prompts} pairs",
    }[job.trainer_class.DATA]
    step = f"step        {of_step}, {config.actor.updates_per_step} update(s)"
    lines = [
        f"run         {job.directory.path}",
        f"model       {config.model.path or 'tiny, made from the seed'}, {config.model.dtype}",
        f"data        {len(job.training):,} {job.trainer_class.DATA}, {held_out:,} held out",
        *([step] if job.trainer_class.TRAINS else []),
        f"sample      up to {job.longest_prompt} + {job.longest_response} tokens",
        f"devices     {len(cluster.devices)} x {cluster.kind}, placement {job.placement.strategy}",
    ]
    return "\n".join([*lines, *plan])
