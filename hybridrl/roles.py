"""Roles: which worker plays each, and with what settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hybridrl.algorithms import BradleyTerry, DirectPreference, PolicyObjective
from hybridrl.algorithms.registry import options_of, policy_loss
from hybridrl.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    JudgeConfig,
    LoraSettings,
    RewardConfig,
    RolloutParallelConfig,
)
from hybridrl.controller import Worker
from hybridrl.engine.train import Loss
from hybridrl.models import load_tokenizer
from hybridrl.trainers import load_trainer
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.engines import ModelSource
from hybridrl.workers.generator import GeneratorWorker
from hybridrl.workers.reference import ReferenceWorker
from hybridrl.workers.reward import RewardWorker
from hybridrl.workers.reward_model import RewardModelWorker

if TYPE_CHECKING:
    from hybridrl.job import Job

Keywords = Mapping[str, Any]


def worker_of(role: str, job: Job) -> tuple[type[Worker], Keywords]:
    """The worker class of a role, and the keywords that it is built with."""
    worker_class, keywords = ROLES[role]
    return worker_class, keywords(job)


def _training(job: Job, role: str) -> ActorConfig:
    """The settings of a model, cut as its place says."""
    return replace(job.config.actor, parallel=job.placement.roles[role].parallel)


def _source(job: Job, path: str | None = None) -> ModelSource:
    return ModelSource(
        path=path or job.model_path,
        tokenizer=job.tokenizer_path,
        dtype=job.config.model.dtype,
        context_length=job.context_length,
        eos_token_ids=_ends(job.model_path, job.tokenizer),
    )


def _ends(path: str, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a response."""
    from transformers import GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a folder without generation_config.json
        eos = None
    found = set(eos if isinstance(eos, list) else [eos]) | {tokenizer.eos_token_id}
    return tuple(sorted(found - {None}))


def _actor(job: Job) -> Keywords:
    config, algorithm = job.config, job.config.algorithm
    return {
        "source": _source(job),
        "config": _training(job, "actor"),
        "rollout": config.rollout,
        "objective": objective(config),
        "updates": _updates(config) + (config.trainer.steps if algorithm.ptx_coefficient else 0),
        "seed": config.run.seed,
        "job": job.name,
        "generates": load_trainer(config.trainer.name).GENERATES and not job.placement.is_separated,
    }


def _generator(job: Job) -> Keywords:
    config = job.config
    tp = job.placement.roles["generator"].parallel.tp
    return {
        "source": _source(job),
        "rollout": replace(config.rollout, parallel=RolloutParallelConfig(tp)),
        "seed": config.run.seed,
        "job": job.name,
        "in_flight": config.placement.in_flight,
    }


def _reference(job: Job) -> Keywords:
    return {
        "source": _source(job),
        "config": _training(job, "reference"),
        "temperature": job.config.rollout.temperature,
    }


def _critic(job: Job, prefix: str) -> Keywords:
    critic, actor = job.config.critic, _training(job, f"{prefix}critic")
    rate = critic.learning_rate or actor.optimizer.learning_rate
    return {
        "source": _source(job, critic.path),
        "config": replace(actor, optimizer=replace(actor.optimizer, learning_rate=rate)),
        "value_clip": critic.value_clip,
        "prefix": prefix,
        "updates": _updates(job.config),
    }


def _reward_model(job: Job) -> Keywords:
    return {
        "source": _source(job),
        "config": _training(job, "reward_model"),
        "objective": BradleyTerry(job.config.preference.centre),
        "updates": _updates(job.config),
    }


def _scores(job: Job, kind: str) -> Keywords:
    config: RewardConfig = getattr(job.config, kind)
    return {
        "config": config,
        "tokenizer": job.tokenizer_path,
        "model": _source(job, config.model) if config.model else None,
        "model_config": replace(_training(job, kind), lora=LoraSettings()),
        "judge": _judge(job, config.judge) if config.judge.path else None,
        "rollout": job.config.rollout,
        "kind": kind,
        "job": job.name,
    }


def _judge(job: Job, config: JudgeConfig) -> ModelSource:
    source = _source(job, config.path)
    return replace(
        source,
        tokenizer=config.path,
        context_length=config.context,
        eos_token_ids=_ends(config.path, load_tokenizer(config.path)),
    )


def _updates(config: Config) -> int:
    return config.trainer.steps * config.actor.updates_per_step


def objective(config: Config) -> Loss:
    """The loss of the policy that the settings describe."""
    if config.preference is not None:
        known = {f.name for f in fields(DirectPreference)}
        settings = {f.name: getattr(config.preference, f.name) for f in fields(config.preference)}
        return DirectPreference(**{k: v for k, v in settings.items() if k in known})
    algorithm = config.algorithm
    names = options_of(policy_loss(algorithm.policy_loss))
    options = {name: getattr(algorithm, name) for name in names if hasattr(algorithm, name)}
    shared = {f.name for f in fields(PolicyObjective)} & {f.name for f in fields(AlgorithmConfig)}
    settings = {name: getattr(algorithm, name) for name in sorted(shared)}
    if algorithm.kl_in_reward:
        settings["kl_coefficient"] = 0.0
    return PolicyObjective(
        options=options | algorithm.loss_options,
        **settings,
    )


ROLES: dict[str, tuple[type[Worker], Callable[[Job], Keywords]]] = {
    "actor": (ActorWorker, _actor),
    "generator": (GeneratorWorker, _generator),
    "critic": (CriticWorker, partial(_critic, prefix="")),
    "cost_critic": (CriticWorker, partial(_critic, prefix="cost_")),
    "reference": (ReferenceWorker, _reference),
    "reward": (RewardWorker, partial(_scores, kind="reward")),
    "cost": (RewardWorker, partial(_scores, kind="cost")),
    "reward_model": (RewardModelWorker, _reward_model),
}
