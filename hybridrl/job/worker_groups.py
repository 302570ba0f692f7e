"""The worker groups of a job, built where its placement says: which worker plays each role, and
with what settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from hybridrl.algorithms import BradleyTerryObjective
from hybridrl.checks.models.tokenizer_checks import find_end_tokens
from hybridrl.config.effective_settings import is_effective
from hybridrl.config.role_models import parse_role_model
from hybridrl.config.schema import (
    FULL_FORMAT,
    ActorConfig,
    Config,
    JudgeConfig,
    LoraAdapterConfig,
    MetaConfig,
    PreferenceConfig,
    RewardConfig,
    RolloutParallelConfig,
)
from hybridrl.controller import Worker, WorkerGroup
from hybridrl.controller.executor import Executor
from hybridrl.controller.fault_injection import FaultInjector
from hybridrl.conversations.rendering import TemplateContext, check_options
from hybridrl.data.mixture import find_source_rewards, list_source_names
from hybridrl.evaluation.eval_sets import resolve_eval_sets
from hybridrl.models.model_loading import load_tokenizer
from hybridrl.placement import GENERATOR_ROLE, Placement
from hybridrl.placement.disaggregated_actor import (
    DisaggregatedActor,
    StreamingActor,
    choose_weight_transport,
)
from hybridrl.system.cluster_spec import DeviceSlot
from hybridrl.systems.low_bits.precision_plan import load_precision_plan
from hybridrl.trainers.role_spec import ACTOR_ROLE, RoleSpec, find_playing_role
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.critic_worker import CriticWorker
from hybridrl.workers.generator_worker import GeneratorWorker
from hybridrl.workers.llm_judge import JudgeSetup
from hybridrl.workers.meta_reward_worker import MetaRewardWorker
from hybridrl.workers.reference_worker import ReferenceWorker
from hybridrl.workers.remote_teacher import RemoteTeacher
from hybridrl.workers.reward_model_worker import RewardModelWorker
from hybridrl.workers.reward_worker import SCORE_COLUMN, RewardWorker, ScoredSources
from hybridrl.workers.training_engines import ModelSource

_WorkerKeywords = Mapping[str, Any]


class PreparedJob(Protocol):
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


def build_worker_groups(job: PreparedJob, executor: Executor) -> dict[str, Any]:
    """Build the worker group of every role and wait until its workers are ready. A role that
    another role plays gets that role's group."""
    groups: dict[str, Any] = {}
    for role, place in job.placement.roles.items():
        worker_class, keywords = resolve_worker(role, job)
        groups[role] = WorkerGroup(executor, role, worker_class, place.devices, **keywords)
    for group in groups.values():
        group.ready()
    if job.placement.is_separated:
        groups["actor"] = _joined_actor(
            groups["actor"], groups["generator"], job.config, executor.cluster.devices
        )
    elif _scores_beside(groups, executor, job.config):
        groups["actor"] = StreamingActor(groups["actor"])
    for role in job.roles:
        groups[role] = groups[find_playing_role(job.roles, role, job.config)]
    return groups


def _scores_beside(groups: Mapping[str, Any], executor: Executor, config: Config) -> bool:
    """Return whether scores are computed while the actor generates: on other threads, of samples
    that an engine ends one by one."""
    actor = groups.get(ACTOR_ROLE)
    generate = getattr(getattr(actor, "worker_class", None), "generate_sequences", None)
    is_ours = generate is ActorWorker.generate_sequences
    if not (is_ours and executor.has_lanes and config.rollout.engine == "vllm"):
        return False
    return any(_gains_by_parts(groups[role]) for role in SCORE_COLUMN if role in groups)


def _gains_by_parts(group: Any) -> bool:
    """Return whether a role scores parts of the samples beside generation, and takes longer for
    them than the further calls do. What decides are settings, not times: vLLM computes samples that
    are handed over in parts in another order, so a resumed run has to decide alike."""
    worker, keywords = group.worker_class, group.keywords
    spec = getattr(getattr(worker, "compute_reward", None), "__transfer__", None)
    if spec is None or not spec.bind(keywords).streams or not worker.runs_beside(keywords):
        return False
    return not (issubclass(worker, RewardWorker) and worker.is_quick(keywords))


def check_injected_faults(job: PreparedJob) -> None:
    """Check that every injected fault belongs to a call of this job's workers.

    Raises:
        ConfigError: names the role, the method or the rank that is not there.
    """
    if faults := FaultInjector():
        places = job.placement.roles.items()
        faults.check({r: (resolve_worker(r, job)[0], len(place.devices)) for r, place in places})


def _joined_actor(
    trainer: WorkerGroup, generator: WorkerGroup, config: Config, devices: Sequence[DeviceSlot]
) -> DisaggregatedActor:
    ends = (devices[number] for number in (*trainer.devices, *generator.devices))
    store, weight_sync = choose_weight_transport(config, ends)
    return DisaggregatedActor(
        trainer,
        generator,
        staleness=config.placement.staleness,
        in_flight=config.placement.in_flight,
        store=store,
        weight_sync=weight_sync,
        differs_from_folder=(
            config.actor.lora.path is not None or config.actor.lora.base_format != FULL_FORMAT
        ),
    )


def resolve_worker(role: str, job: PreparedJob) -> tuple[type[Worker], _WorkerKeywords]:
    """Return the worker class of a role and the keyword arguments it is built with."""
    if role == GENERATOR_ROLE:
        return GeneratorWorker, _make_generator_keywords(job)
    spec = job.roles[role]
    own = {**parse_role_model(job.config, role).further, **spec.keywords}
    if isinstance(spec.worker, str):
        worker_class, usual = WORKER_BUILDERS[spec.worker]
        return worker_class, {**usual(job, role), **own}
    named = inspect.signature(spec.worker.__init__).parameters
    offered = _make_actor_keywords(job, role)
    return spec.worker, {**{k: v for k, v in offered.items() if k in named}, **own}


def _make_training_config(job: PreparedJob, role: str) -> ActorConfig:
    """Return the training settings of a role's model, with its own optimizer and its placement's
    parallelism."""
    actor = job.config.actor
    if job.roles[role].path(role, job.config) is not None:  # adapters of the policy's model
        actor = replace(actor, lora=replace(actor.lora, path=None))
    return replace(
        actor,
        parallel=job.placement.roles[role].parallel,
        optimizer=parse_role_model(job.config, role).optimizer_of(actor.optimizer),
    )


def _make_policy_source(job: PreparedJob, path: str | None = None) -> ModelSource:
    return ModelSource(
        path=path or job.model_path,
        tokenizer=job.tokenizer_path,
        dtype=job.config.model.dtype,
        context_length=job.context_length,
        eos_token_ids=find_end_tokens(job.model_path, job.tokenizer),
        save_dtype=job.config.model.save_dtype,
        file_bytes=round(job.config.model.file_gib * 2**30),
        seed=job.config.run.seed,
        template=TemplateContext.of(job.config.data.chat_template_options, job.config.data.date),
    )


def _make_role_source(job: PreparedJob, role: str) -> ModelSource:
    source = _make_policy_source(job, job.roles[role].path(role, job.config))
    return replace(source, precision=load_precision_plan(job.config, role))


def _make_model_keywords(job: PreparedJob, role: str) -> _WorkerKeywords:
    """Return the keyword arguments of every worker that has a model of its own."""
    return {
        "source": _make_role_source(job, role),
        "config": _make_training_config(job, role),
    }


def _make_actor_keywords(job: PreparedJob, role: str) -> _WorkerKeywords:
    config, beside = job.config, "algorithm.ptx_coefficient"
    learns_beside = bool(config.algorithm.ptx_coefficient and is_effective(beside, config))
    steps = max(0, config.trainer.steps - config.critic.warmup_steps)
    separated = role == ACTOR_ROLE and job.placement.is_separated
    return {
        "source": replace(_make_role_source(job, role), adapters=_get_separate_adapters(config)),
        "config": _make_training_config(job, role),
        "rollout": config.rollout,
        "environment": config.environment,
        "objective": job.trainer_class.objective(config),
        "temperature": _temperature(job),
        "updates": steps * (config.actor.step_updates + learns_beside),
        "job": job.name,
        "generates": job.roles[role].generates and not separated,
        "cache": config.cache,
    }


def _get_separate_adapters(config: Config) -> LoraAdapterConfig | None:
    """Return the LoRA settings of adapters that are sent to the generator separately; None if all
    weights are sent."""
    return config.actor.lora if config.rollout.adapters == "separate" else None


def _make_generator_keywords(job: PreparedJob) -> _WorkerKeywords:
    config = job.config
    parallel = job.placement.roles[GENERATOR_ROLE].parallel
    return {
        "source": replace(_make_policy_source(job), adapters=_get_separate_adapters(config)),
        "rollout": replace(
            config.rollout, parallel=RolloutParallelConfig(parallel.tp, parallel.pp)
        ),
        "environment": config.environment,
        "seed": config.run.seed,
        "job": job.name,
        "in_flight": config.placement.in_flight,
        "neighbours": config.data.order == "prefix",
    }


def _make_reference_keywords(job: PreparedJob, role: str) -> _WorkerKeywords:
    return {
        **_make_model_keywords(job, role),
        "temperature": _temperature(job),
        "cache": job.config.cache,
    }


def _temperature(job: PreparedJob) -> float:
    """At which responses are scored and learned from: that of sampling, or 1 where the job samples
    none and what it learns was written by others."""
    samples = any(spec.generates for spec in job.roles.values())
    return job.config.rollout.temperature if samples else 1.0


def _make_critic_keywords(job: PreparedJob, role: str) -> _WorkerKeywords:
    return {
        **_make_model_keywords(job, role),
        "value_clip": job.config.critic.value_clip,
        "prefix": "",
        "updates": _count_updates(job.config, job.config.critic.epochs),
    }


def _make_reward_model_keywords(job: PreparedJob, role: str) -> _WorkerKeywords:
    return {
        **_make_model_keywords(job, role),
        "objective": BradleyTerryObjective((job.config.preference or PreferenceConfig()).centre),
        "updates": _count_updates(job.config),
    }


def _make_meta_reward_keywords(job: PreparedJob, role: str) -> _WorkerKeywords:
    return {
        **_make_model_keywords(job, role),
        "meta": job.config.meta or MetaConfig(),
        "updates": _count_updates(job.config),
    }


def _make_reward_keywords(job: PreparedJob, role: str, kind: str) -> _WorkerKeywords:
    config: RewardConfig = getattr(job.config, kind)
    sets = resolve_eval_sets(job.config) if kind == "reward" else {}
    return {
        "config": config,
        "tokenizer": job.tokenizer_path,
        "model": _make_role_source(job, role) if config.model else None,
        "model_config": replace(_make_training_config(job, role), lora=LoraAdapterConfig()),
        "judge": _make_judge_source(job, kind, config.judge) if config.judge.path else None,
        "kind": kind,
        "sources": ScoredSources(
            list_source_names(job.config.data),
            find_source_rewards(job.config.data) if kind == "reward" else {},
            {name: one.reward for name, one in sets.items() if one.is_verified},
        ),
        "steps": kind == "reward" and job.config.algorithm.step_credit is not None,
        "cache": job.config.cache,
    }


def _make_judge_source(job: PreparedJob, kind: str, config: JudgeConfig) -> JudgeSetup:
    path = config.path
    assert path is not None
    source, tokenizer = _make_policy_source(job, path), load_tokenizer(path)
    template = source.template
    if (options := config.chat_template_options) is not None:
        check_options(options, tokenizer, f"{kind}.judge.chat_template_options")
        template = replace(template, options=options)
    source = replace(
        source,
        tokenizer=path,
        context_length=config.context,
        eos_token_ids=find_end_tokens(path, tokenizer),
        template=template,
    )
    return JudgeSetup(source, job.config.rollout, job.name)


def _count_updates(config: Config, epochs: int | None = None) -> int:
    epochs = epochs or config.actor.epochs
    return config.trainer.steps * config.actor.updates_per_step * epochs


WORKER_BUILDERS: dict[str, tuple[type[Worker], Callable[[PreparedJob, str], _WorkerKeywords]]] = {
    "actor": (ActorWorker, _make_actor_keywords),
    "critic": (CriticWorker, _make_critic_keywords),
    "reference": (ReferenceWorker, _make_reference_keywords),
    "remote_teacher": (RemoteTeacher, lambda job, _: {"source": _make_policy_source(job)}),
    "reward": (RewardWorker, partial(_make_reward_keywords, kind="reward")),
    "cost": (RewardWorker, partial(_make_reward_keywords, kind="cost")),
    "reward_model": (RewardModelWorker, _make_reward_model_keywords),
    "meta_reward_model": (MetaRewardWorker, _make_meta_reward_keywords),
}
"""The worker class and default keyword arguments of each kind of
`hybridrl.trainers.role_spec.WORKER_DEFAULTS`."""
