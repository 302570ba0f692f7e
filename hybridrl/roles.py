"""Roles: which worker plays each, and with what settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hybridrl.algorithms import PolicyObjective
from hybridrl.config.schema import AlgorithmConfig
from hybridrl.controller import Worker
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.policy import ModelSource
from hybridrl.workers.reference import ReferenceWorker
from hybridrl.workers.reward import RewardWorker

if TYPE_CHECKING:
    from hybridrl.job import Job

Keywords = Mapping[str, Any]


def worker_of(role: str, job: Job) -> tuple[type[Worker], Keywords]:
    """The worker class of a role, and the keywords that it is built with."""
    worker_class, keywords = ROLES[role]
    return worker_class, keywords(job)


def _source(job: Job) -> ModelSource:
    from transformers import GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(job.model_path).eos_token_id
    except OSError:  # a folder without generation_config.json
        eos = None
    found = set(eos if isinstance(eos, list) else [eos]) | {job.tokenizer.eos_token_id}
    return ModelSource(
        path=job.model_path,
        tokenizer=job.tokenizer_path,
        dtype=job.config.model.dtype,
        context_length=job.context_length,
        eos_token_ids=tuple(sorted(found - {None})),
    )


def _actor(job: Job) -> Keywords:
    config = job.config
    return {
        "source": _source(job),
        "config": config.actor,
        "rollout": config.rollout,
        "objective": objective(config.algorithm),
        "updates": config.trainer.steps * config.actor.updates_per_step,
        "seed": config.run.seed,
        "job": job.name,
    }


def _reference(job: Job) -> Keywords:
    return {
        "source": _source(job),
        "config": job.config.actor,
        "temperature": job.config.rollout.temperature,
    }


def _reward(job: Job) -> Keywords:
    return {"config": job.config.reward, "tokenizer": job.tokenizer_path}


def objective(config: AlgorithmConfig) -> PolicyObjective:
    """The loss that the algorithm settings describe. A loss gets the options that it knows."""
    options = {
        "ppo_clip": ("clip_low", "clip_high", "dual_clip"),
        "gspo": ("clip_low", "clip_high"),
        "cispo": ("clip_low", "clip_high"),
        "gmpo": ("clip_low", "clip_high"),
    }.get(config.policy_loss, ())
    shared = {f.name for f in fields(PolicyObjective)} & {f.name for f in fields(AlgorithmConfig)}
    return PolicyObjective(
        options={name: getattr(config, name) for name in options},
        **{name: getattr(config, name) for name in sorted(shared)},
    )


ROLES: dict[str, tuple[type[Worker], Callable[[Job], Keywords]]] = {
    "actor": (ActorWorker, _actor),
    "reference": (ReferenceWorker, _reference),
    "reward": (RewardWorker, _reward),
}
