"""Checks of environment settings, before any environment process starts."""

from __future__ import annotations

from typing import Any

from hybridrl.config.schema import Config, is_served
from hybridrl.data.environment_tasks import refuse_missing_environment
from hybridrl.environments.adapter_lookup import find_interpreter, resolve_adapter
from hybridrl.errors import ConfigError
from hybridrl.trainers import load_roles

_CHAT_ADAPTERS = ("verifiers", "gymnasium", "openenv", "mcp")
"""Adapters that send messages; functions and commands may send plain texts."""


def check_environment(config: Config) -> None:
    """Refuse an unknown environment, or one that no role would use.

    Raises:
        ConfigError: names the settings.
    """
    environment = config.environment
    if environment.name is None and config.data.task == "environment":
        raise ConfigError(refuse_missing_environment)
    if not is_served(config.rollout, environment):
        return
    if environment.name is None:
        _check_environment_rollout(config, "rollout.serve=true")
        return
    resolve_adapter(environment)
    find_interpreter(environment)
    shown = f"environment.name={environment.name}"
    _check_environment_rollout(config, shown)
    if config.rollout.routing_replay:
        raise ConfigError(
            f"{shown} with rollout.routing_replay=true: of samples of several turns experts are "
            "not kept yet. Set rollout.routing_replay=false."
        )
    if config.data.task == "environment" and config.warmup.steps:
        raise ConfigError(
            f"warmup.steps={config.warmup.steps} with data=environment: tasks of an environment "
            "have no right answers to imitate. Set warmup.steps=0."
        )


def _check_environment_rollout(config: Config, shown: str) -> None:
    """Refuse settings that conflict with samples played by an environment or over an endpoint.

    Args:
        shown: The setting by which they play.
    """
    setting = shown.partition("=")[0]
    if config.rollout.episode is not None:
        raise ConfigError(
            f"{shown} with rollout.episode={config.rollout.episode}: one of the two plays the "
            "samples. Leave one of them out."
        )
    if not any(spec.generates for spec in load_roles(config).values()):
        raise ConfigError(
            f"{shown}, but trainer.name={config.trainer.name} samples nothing, so nobody would "
            f"play. Leave {setting} out, or take another algorithm."
        )
    if config.algorithm.overlong_buffer:
        raise ConfigError(
            f"{shown} with algorithm.overlong_buffer={config.algorithm.overlong_buffer}: "
            "rollout.max_tokens is the limit of one turn there, and a sample of several turns is "
            "longer. Set algorithm.overlong_buffer=0."
        )
    settings = config.distillation
    if settings is not None and settings.teacher_prompt is not None:
        raise ConfigError(
            f"{shown} with distillation.teacher_prompt={settings.teacher_prompt}: what a model "
            "reads in an episode its program says, and a teacher would read this in its place. "
            "Leave one of them out."
        )


def check_chat_template(config: Config, tokenizer: Any) -> None:
    """Refuse a tokenizer without a chat template if the environment sends chat messages.

    Raises:
        ConfigError: names the model.
    """
    name = config.environment.name
    if name in _CHAT_ADAPTERS and not tokenizer.chat_template:
        path = config.model.tokenizer or config.model.path
        raise ConfigError(
            f"environment.name={name} sends chat messages, but the tokenizer `{path}` has no chat "
            "template. Use an instruction-tuned model, or set its `chat_template`."
        )
