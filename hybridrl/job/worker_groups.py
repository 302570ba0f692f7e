"""The worker groups of a job, built where its placement says: which worker plays each role, and
with what settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from hybridrl.algorithms import BradleyTerry
from hybridrl.checks.models.tokenizer_checks import end_tokens
from hybridrl.config.effective_settings import counts
from hybridrl.config.eval_sets import eval_sets
from hybridrl.config.role_models import model_settings
from hybridrl.config.schema import (
    ActorConfig,
    Config,
    JudgeConfig,
    LoraSettings,
    PreferenceConfig,
    RewardConfig,
    RolloutParallelConfig,
)
from hybridrl.controller import Worker, WorkerGroup
from hybridrl.controller.executor import Executor
from hybridrl.controller.fault_injection import PlannedFaults
from hybridrl.conversations.rendering import TemplateContext, check_options
from hybridrl.data.mixture import rewards_of, source_names
from hybridrl.models import load_tokenizer
from hybridrl.placement import GENERATOR, Placement
from hybridrl.placement.disaggregated_actor import SeparatedActor
from hybridrl.placement.separation import way_of_weights
from hybridrl.system.cluster_spec import Device
from hybridrl.systems.low_bits.role_plans import plan_of
from hybridrl.trainers.role_spec import ACTOR, RoleSpec, played_by
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.critic_worker import CriticWorker
from hybridrl.workers.generator_worker import GeneratorWorker
from hybridrl.workers.llm_judge import JudgeSetup
from hybridrl.workers.reference_worker import ReferenceWorker
from hybridrl.workers.reward_model_worker import RewardModelWorker
from hybridrl.workers.reward_worker import RewardWorker, ScoredSources
from hybridrl.workers.training_engines import ModelSource

Keywords = Mapping[str, Any]


class Built(Protocol):
    """The parts of a job that its workers are built from."""

    config: Config
    name: str
    roles: Mapping[str, RoleSpec]
    trainer_class: Any
    placement: Placement
    model_path: str
    tokenizer_path: str
    tokenizer: Any
    context_length: int


def build_groups(job: Built, executor: Executor) -> dict[str, Any]:
    """Build the worker group of every role and wait until its workers are ready. A role that
    another role plays gets that role's group."""
    groups: dict[str, Any] = {}
    for role, place in job.placement.roles.items():
        worker_class, keywords = worker_of(role, job)
        groups[role] = WorkerGroup(executor, role, worker_class, place.devices, **keywords)
    for group in groups.values():
        group.ready()
    if job.placement.is_separated:
        groups["actor"] = _joined_actor(
            groups["actor"], groups["generator"], job.config, executor.cluster.devices
        )
    for role in job.roles:
        groups[role] = groups[played_by(job.roles, role, job.config)]
    return groups


def check_planned_faults(job: Built) -> None:
    """Check that every injected fault belongs to a call of this job's workers.

    Raises:
        ConfigError: names the role, the method or the rank that is not there.
    """
    if faults := PlannedFaults():
        places = job.placement.roles.items()
        faults.check({r: (worker_of(r, job)[0], len(place.devices)) for r, place in places})


def _joined_actor(
    trainer: WorkerGroup, generator: WorkerGroup, config: Config, devices: Sequence[Device]
) -> SeparatedActor:
    ends = (devices[number] for number in (*trainer.devices, *generator.devices))
    store, weight_sync = way_of_weights(config, ends)
    return SeparatedActor(
        trainer,
        generator,
        staleness=config.placement.staleness,
        in_flight=config.placement.in_flight,
        store=store,
        weight_sync=weight_sync,
        differs_from_folder=config.actor.lora.path is not None,
    )


def worker_of(role: str, job: Built) -> tuple[type[Worker], Keywords]:
    """Return the worker class of a role and the keyword arguments it is built with."""
    if role == GENERATOR:
        return GeneratorWorker, _generator(job)
    spec = job.roles[role]
    own = {**model_settings(job.config, role).further, **spec.keywords}
    if isinstance(spec.worker, str):
        worker_class, usual = KINDS[spec.worker]
        return worker_class, {**usual(job, role), **own}
    named = inspect.signature(spec.worker.__init__).parameters
    offered = _actor(job, role)
    return spec.worker, {**{k: v for k, v in offered.items() if k in named}, **own}


def _training(job: Built, role: str) -> ActorConfig:
    """Return the training settings of a role's model, with its own optimizer and its placement's
    parallelism."""
    actor = job.config.actor
    if job.roles[role].path(role, job.config) is not None:  # adapters of the policy's model
        actor = replace(actor, lora=replace(actor.lora, path=None))
    return replace(
        actor,
        parallel=job.placement.roles[role].parallel,
        optimizer=model_settings(job.config, role).optimizer_of(actor.optimizer),
    )


def _source(job: Built, path: str | None = None) -> ModelSource:
    return ModelSource(
        path=path or job.model_path,
        tokenizer=job.tokenizer_path,
        dtype=job.config.model.dtype,
        context_length=job.context_length,
        eos_token_ids=end_tokens(job.model_path, job.tokenizer),
        save_dtype=job.config.model.save_dtype,
        file_bytes=round(job.config.model.file_gib * 2**30),
        seed=job.config.run.seed,
        template=TemplateContext.of(job.config.data.chat_template_options, job.config.data.date),
    )


def _own_source(job: Built, role: str) -> ModelSource:
    source = _source(job, job.roles[role].path(role, job.config))
    return replace(source, precision=plan_of(job.config, role))


def _actor(job: Built, role: str) -> Keywords:
    config, beside = job.config, "algorithm.ptx_coefficient"
    learns_beside = bool(config.algorithm.ptx_coefficient and counts(beside, config))
    steps = max(0, config.trainer.steps - config.critic.warmup_steps)
    separated = role == ACTOR and job.placement.is_separated
    return {
        "source": replace(_own_source(job, role), adapters=_adapters(config)),
        "config": _training(job, role),
        "rollout": config.rollout,
        "environment": config.environment,
        "objective": job.trainer_class.objective(config),
        "temperature": _temperature(job),
        "updates": steps * (config.actor.updates_per_step + learns_beside),
        "job": job.name,
        "generates": job.roles[role].generates and not separated,
    }


def _adapters(config: Config) -> LoraSettings | None:
    """Return the LoRA settings of adapters that are sent to the generator separately; None if all
    weights are sent."""
    return config.actor.lora if config.rollout.adapters == "separate" else None


def _generator(job: Built) -> Keywords:
    config = job.config
    parallel = job.placement.roles[GENERATOR].parallel
    return {
        "source": replace(_source(job), adapters=_adapters(config)),
        "rollout": replace(
            config.rollout, parallel=RolloutParallelConfig(parallel.tp, parallel.pp)
        ),
        "environment": config.environment,
        "seed": config.run.seed,
        "job": job.name,
        "in_flight": config.placement.in_flight,
    }


def _reference(job: Built, role: str) -> Keywords:
    return {
        "source": _own_source(job, role),
        "config": _training(job, role),
        "temperature": _temperature(job),
    }


def _temperature(job: Built) -> float:
    """At which responses are scored and learned from: that of sampling, or 1 where the job samples
    none and what it learns was written by others."""
    samples = any(spec.generates for spec in job.roles.values())
    return job.config.rollout.temperature if samples else 1.0


def _critic(job: Built, role: str) -> Keywords:
    return {
        "source": _own_source(job, role),
        "config": _training(job, role),
        "value_clip": job.config.critic.value_clip,
        "prefix": "",
        "updates": _updates(job.config),
    }


def _reward_model(job: Built, role: str) -> Keywords:
    return {
        "source": _own_source(job, role),
        "config": _training(job, role),
        "objective": BradleyTerry((job.config.preference or PreferenceConfig()).centre),
        "updates": _updates(job.config),
    }


def _scores(job: Built, role: str, kind: str) -> Keywords:
    config: RewardConfig = getattr(job.config, kind)
    sets = eval_sets(job.config) if kind == "reward" else {}
    return {
        "config": config,
        "tokenizer": job.tokenizer_path,
        "model": _own_source(job, role) if config.model else None,
        "model_config": replace(_training(job, role), lora=LoraSettings()),
        "judge": _judge(job, kind, config.judge) if config.judge.path else None,
        "kind": kind,
        "sources": ScoredSources(
            source_names(job.config.data),
            rewards_of(job.config.data) if kind == "reward" else {},
            {name: one.reward for name, one in sets.items() if one.is_verified},
        ),
        "steps": kind == "reward" and job.config.algorithm.step_credit is not None,
    }


def _judge(job: Built, kind: str, config: JudgeConfig) -> JudgeSetup:
    source, tokenizer = _source(job, config.path), load_tokenizer(config.path)
    template = source.template
    if (options := config.chat_template_options) is not None:
        check_options(options, tokenizer, f"{kind}.judge.chat_template_options")
        template = replace(template, options=options)
    source = replace(
        source,
        tokenizer=config.path,
        context_length=config.context,
        eos_token_ids=end_tokens(config.path, tokenizer),
        template=template,
    )
    return JudgeSetup(source, job.config.rollout, job.name)


def _updates(config: Config) -> int:
    return config.trainer.steps * config.actor.updates_per_step


KINDS: dict[str, tuple[type[Worker], Callable[[Built, str], Keywords]]] = {
    "actor": (ActorWorker, _actor),
    "critic": (CriticWorker, _critic),
    "reference": (ReferenceWorker, _reference),
    "reward": (RewardWorker, partial(_scores, kind="reward")),
    "cost": (RewardWorker, partial(_scores, kind="cost")),
    "reward_model": (RewardModelWorker, _reward_model),
}
"""The worker class and default keyword arguments of each kind of
`hybridrl.programs.role_spec.WORKER_DEFAULTS`."""
