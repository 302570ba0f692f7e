"""What can be wrong with a configuration beyond types: refused here, before anything starts."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from hybridrl.checks.algorithm import check_algorithm
from hybridrl.checks.checkpoints import check_checkpoints
from hybridrl.checks.model_folder import check_model
from hybridrl.checks.names import one_of
from hybridrl.checks.placement import check_placement
from hybridrl.checks.roles import check_roles
from hybridrl.checks.rollout import check_rollout
from hybridrl.checks.training import check_training
from hybridrl.config.schema import CHECKPOINTING, Config
from hybridrl.core.cluster import Cluster, choose_devices
from hybridrl.errors import ConfigError, MissingPackageError
from hybridrl.trainers.role_spec import RoleSpec

POSITIVE = (
    "data.prompts_per_step",
    "data.max_prompt_tokens",
    "rollout.samples_per_prompt",
    "rollout.max_tokens",
    "rollout.max_sequences",
    "rollout.kv_cache_gib",
    "rollout.max_turns",
    "rollout.tool_timeout_s",
    "actor.tokens_per_microbatch",
    "actor.updates_per_step",
    "actor.optimizer.learning_rate",
    "trainer.steps",
    "checkpoint.keep_last",
    "eval.prompts",
    "eval.samples",
    "model.file_gib",
    *(f"actor.parallel.{axis}" for axis in ("tp", "pp", "ulysses", "ring", "chunks")),
    "rollout.parallel.tp",
    "model.tiny.hidden_size",
    "model.tiny.layers",
    "model.tiny.heads",
    "ray.start_timeout_s",
    "controller.timeout_s",
    "recover.grace_s",
    "controller.heartbeat_s",
    "guard.most_skipped",
    "guard.most_mismatch",
    "reward.processes",
    "reward.timeout_s",
)
NOT_NEGATIVE = (
    "run.seed",
    "model.tiny.experts",
    "warmup.steps",
    "eval.every",
    "checkpoint.every",
    "checkpoint.every_minutes",
    "checkpoint.keep_every",
    "recover.max_restarts",
    "recover.wait_s",
    "rollout.temperature",
    "rollout.top_k",
    "actor.router_loss_weight",
    "actor.optimizer.warmup_steps",
    "actor.optimizer.max_grad_norm",
    "actor.optimizer.weight_decay",
    "algorithm.kl_coefficient",
    "algorithm.clip_low",
    "algorithm.clip_high",
    "algorithm.max_refills",
    "observe.samples_every",
    "observe.show_every",
    "observe.timeline_every",
)
OF_OTHERS = ("reward.options", "cost.options", "rollout.engine_options")
"""Settings whose meaning only the user's functions, or vLLM, know."""


def check(config: Config, roles: Mapping[str, RoleSpec] | None = None) -> None:
    """Raises a sentence for the first thing that is wrong.

    Args:
        roles: Of a job, where they are not its trainer's.

    Raises:
        ConfigError: names the setting, its value, what was expected and what to do.
        MissingPackageError: names the extra to install.
    """
    _check_finite(config)
    for name in POSITIVE:
        if (value := _get(config, name)) is not None and value <= 0:
            raise ConfigError(f"{name}={value}: must be more than 0.")
    for name in NOT_NEGATIVE:
        if (value := _get(config, name)) < 0:
            raise ConfigError(f"{name}={value}: must be 0 or more.")
    _check_names(config)
    _check_data(config)
    _check_devices_asked(config)
    check_training(config)
    check_rollout(config)
    check_checkpoints(config, roles)
    check_roles(config, roles)
    check_algorithm(config)
    _check_rewards(config)
    _check_packages(config)
    if not config.run.dry:  # a recipe for other machines can be looked at on this one
        _check_devices(config)


def _check_finite(value: Any, name: str = "") -> None:
    """Refuses what is not a number, which every comparison would let pass, and infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}={value}: must be a finite number.")
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping) and name not in OF_OTHERS:
        for key, entry in value.items():
            _check_finite(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for entry in value:
            _check_finite(entry, name)


def _check_names(config: Config) -> None:
    from hybridrl.algorithms.group_advantages import SCALES
    from hybridrl.algorithms.registry import policy_loss
    from hybridrl.algorithms.weights import MODES
    from hybridrl.core.dtypes import AUTO, DTYPES
    from hybridrl.engine.optimizer import SCHEDULES
    from hybridrl.trainers import load_trainer
    from hybridrl.trainers.feed import check_sampler

    one_of("executor", config.executor, ("ray", "inline"))
    one_of("devices", config.devices, ("auto", "cpu", "cuda"))
    one_of("model.dtype", config.model.dtype, (AUTO, *DTYPES))
    if config.model.dtype == "float16" and load_trainer(config.trainer.name).TRAINS:
        raise ConfigError(
            "model.dtype=float16: small gradients would become 0 in it, the more the fewer devices "
            "there are, because nothing scales the loss. Set model.dtype=bfloat16, or float32."
        )
    if config.model.save_dtype is not None:
        one_of("model.save_dtype", config.model.save_dtype, DTYPES)
    one_of("actor.compile", config.actor.compile, (AUTO, "true", "false"))
    one_of("actor.gradient_checkpointing", config.actor.gradient_checkpointing, CHECKPOINTING)
    one_of("data.too_long", config.data.too_long, ("error", "drop"))
    one_of("reward.on_error", config.reward.on_error, ("fail", "drop", "value"))
    one_of("guard.on_nan", config.guard.on_nan, ("skip", "stop", "rewind"))
    one_of("rollout.engine", config.rollout.engine, ("vllm", "transformers"))
    one_of("actor.optimizer.schedule", config.actor.optimizer.schedule, SCHEDULES)
    one_of("algorithm.advantage_scale", config.algorithm.advantage_scale, SCALES)
    one_of("algorithm.aggregation", config.algorithm.aggregation, MODES)
    load_trainer(config.trainer.name)
    check_sampler(config)
    policy_loss(config.algorithm.policy_loss)


def _check_data(config: Config) -> None:
    data = config.data
    if data.task is None and not data.path:
        raise ConfigError(
            "There are no prompts: set data=jsonl data.path=<file, folder or data set>, or "
            "data=arithmetic."
        )
    if data.task is not None and data.path:
        raise ConfigError(
            f"Both data.task={data.task} and data.path={data.path} are set. Write data=jsonl to "
            "read the file, or leave data.path out."
        )
    if config.warmup.steps and data.task is None:
        raise ConfigError(
            f"warmup.steps={config.warmup.steps}, but supervised warm-up needs a built-in task "
            "(data.task), whose answers are known. Set warmup.steps=0."
        )
    if data.task is None and config.model.path is None:
        raise ConfigError(
            "model.path is not set. The tiny model that is made without it knows only the "
            "characters of a built-in task; set model.path=<folder or hub name>."
        )


def _check_devices_asked(config: Config) -> None:
    if config.num_devices is not None and config.num_devices < 1:
        raise ConfigError(
            f"num_devices={config.num_devices}: must be 1 or more, or null for every GPU or two "
            "CPU slots."
        )
    if config.executor == "inline" and (config.num_devices or 1) > 1:
        raise ConfigError(
            f"num_devices={config.num_devices}: executor=inline runs on one device, in the "
            "driver's process. Set num_devices=1, or executor=ray."
        )


def _check_rewards(config: Config) -> None:
    from hybridrl.rewards import RewardPool, function_list
    from hybridrl.trainers import load_roles

    kinds = [spec.worker for spec in load_roles(config).values()]
    for kind in ("reward", "cost"):
        if kind not in kinds:
            continue
        settings = getattr(config, kind)
        functions = function_list(settings.function)
        judge = settings.judge
        for path, name in ((settings.model, "model"), (judge.path, "judge.path")):
            if path:
                check_model(path, f"{kind}.{name}")
        if judge.template and not Path(judge.template).is_file():
            raise ConfigError(f"{kind}.judge.template={judge.template}: there is no such file.")
        if judge.path and judge.context <= judge.max_tokens:
            raise ConfigError(
                f"{kind}.judge.context={judge.context} leaves no room beside "
                f"{kind}.judge.max_tokens={judge.max_tokens}."
            )
        if not 0 < judge.memory_share < 1:
            raise ConfigError(f"{kind}.judge.memory_share={judge.memory_share}: must be in (0, 1).")
        # A model, a judge or an episode may give all the reward there is.
        if functions or not (settings.model or judge.path or config.rollout.episode):
            RewardPool.check(functions, settings.weights, settings.options)


def _check_packages(config: Config) -> None:
    from hybridrl.trainers import load_roles

    generates = any(spec.generates for spec in load_roles(config).values())
    needed = {
        "ray": config.executor == "ray",
        "vllm": generates and config.rollout.engine == "vllm",
        "peft": config.actor.lora.rank is not None,
    }
    instead = {
        "ray": "executor=inline",
        "vllm": "rollout=transformers",
        "peft": "actor.lora.rank=null",
    }
    for package, wanted in needed.items():
        if wanted and importlib.util.find_spec(package) is None:
            raise MissingPackageError(
                f"{package} is not installed: pip install 'hybridrl[cpu]' (or 'hybridrl[gpu]' on a "
                f"machine with GPUs). To do without it: {instead[package]}."
            )


def _check_devices(config: Config) -> None:
    """On this machine; a cluster's devices are counted when it has been joined."""
    if config.ray.address is None and "RAY_ADDRESS" not in os.environ:
        check_placement(config, devices_here(config))


def devices_here(config: Config) -> Cluster:
    """The devices that a job gets of this machine.

    Raises:
        ConfigError: if there are fewer than asked for.
    """
    import torch

    inline = config.executor == "inline"
    cpus = 1 if inline else os.cpu_count() or 1
    number = 1 if inline else config.num_devices
    gpus = torch.accelerator.device_count()
    return Cluster.of_one_node(*choose_devices(config.devices, number, gpus, cpus))


def _get(config: Config, name: str) -> float:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value  # type: ignore[return-value]
