"""Composition of a job's configuration from defaults, presets and `key=value` overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from hybridrl.composition import secrets
from hybridrl.composition.adapter_start import with_adapters
from hybridrl.composition.model_start import resolve_run_models
from hybridrl.composition.overrides import (
    SettingOverride,
    find_setting_type,
    parse_overrides,
    suggest_brackets,
)
from hybridrl.composition.setting_names import (
    check_setting_name,
    list_settings,
    without_old_settings,
)
from hybridrl.config.changed import read_setting
from hybridrl.config.effective_settings import select_effective_settings
from hybridrl.config.objective_schema import RewardConfig
from hybridrl.config.presets import (
    DATA,
    DEFAULT_PRESETS,
    FILES,
    find_presets_setting,
    flatten_settings,
    list_preset_settings,
    list_presets,
    load_preset,
)
from hybridrl.config.schema import Config, is_served
from hybridrl.config.setting_types import (
    describe_expected,
    explain_wrong_type,
    find_invalid_values,
    format_refusal,
    is_group,
    is_optional,
    strip_annotations,
)
from hybridrl.config.task_settings import said_by_task, with_task_noted
from hybridrl.errors import ConfigError, ErrorCollector, suggest_name
from hybridrl.system.bounded_files import load_yaml

_PLACE_OF_ROWS = re.compile(r"data(\.(task|path|sources)(\..*)?)?")
"""Settings that name data."""


def compose_config(overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """Return the typed configuration that overrides ask for, and the dotted names of the settings
    that they and presets give. What a run that is resumed has is not in it; see `load_config`.

    Raises:
        ConfigError: for each unknown key (names the nearest), value of the wrong type, or value
            that has to be given.
    """
    problems = ErrorCollector()
    read = parse_overrides(overrides, problems)
    composed, instead, is_default = _composed_for_rows(read, problems)
    if problems:  # so that what is wrong with the settings that there are is told beside it
        with problems.noted():
            if wrong := dict(find_invalid_values(build_config(composed))):
                raise ConfigError(*wrong.values())
    problems.raise_if_any()
    keys: list[str] = []
    for override in read:  # of a preset all settings that presets of its group set
        keys += list_preset_settings(override.key) if override.is_preset else [override.key]
    config = build_config(composed)
    named = {override.key for override in read}
    if "trainer.steps" in named:
        if "trainer.epochs" in named and config.trainer.epochs is not None:
            raise ConfigError(
                f"trainer.steps={config.trainer.steps} and trainer.epochs={config.trainer.epochs} "
                "are two lengths of one run. Leave one of them out."
            )
        keys.append("trainer.epochs")  # in place of those of the run that is resumed
    if is_served(config.rollout, config.environment) and not any(map(_names_functions, read)):
        config = _without_default_function(config)
    if instead:
        config = with_task_noted(config, instead, is_default)
    return config, keys


def _names_functions(override: SettingOverride) -> bool:
    """Return whether the override names the reward functions."""
    is_group = override.key == "reward" and isinstance(override.value, Mapping)
    return override.key == "reward.function" or (is_group and "function" in override.value)


def _without_default_function(config: Config) -> Config:
    """Leave the reward to the programs that play: the default function would be added to it."""
    if config.reward.function != RewardConfig().function:  # that of a preset
        return config
    return replace(config, reward=replace(config.reward, function=[]))


def load_run_config(file: Path) -> Config:
    """Load the configuration of a run from its `config.yaml`.

    Raises:
        ConfigError: if they cannot be read.
    """
    try:
        stored = OmegaConf.create(without_old_settings(load_yaml(file) or {}))
        return build_config(OmegaConf.merge(OmegaConf.structured(Config), stored))  # type: ignore[arg-type]
    except (OSError, ValueError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{file} could not be read: {str(error).splitlines()[0]}. Bring it back from a copy."
        ) from error


def build_config(config: DictConfig) -> Config:
    """Build the configuration dataclasses from a composed OmegaConf configuration.

    Raises:
        ConfigError: if a value that refers to another, or to the environment, cannot be had.
    """
    try:
        found = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain_unresolved(config, error)) from None
    if not isinstance(found, Config):
        raise ConfigError("The configuration is not of the schema's type; start from Config().")
    # OmegaConf looks at no list that refers to another value.
    for name, hint in list_settings().items():
        value = read_setting(found, name)
        if value is not None and (refusal := explain_wrong_type(hint, value)):
            raise ConfigError(format_refusal(name, value, hint, refusal))
    return with_adapters(resolve_run_models(secrets.mark_secrets(found, config)))


def format_config_yaml(config: Config) -> str:
    """Format the resolved configuration for `config.yaml`, with secrets redacted."""
    return OmegaConf.to_yaml(OmegaConf.structured(_make_writable(config)))


def format_effective_yaml(config: Config) -> str:
    """Format the settings that have an effect in this job, for people to read."""
    settings = OmegaConf.create(select_effective_settings(_make_writable(config), config))
    by_task = said_by_task(config)
    head = f"# As data={config.data.task} has them: {by_task}\n" if by_task else ""
    return head + OmegaConf.to_yaml(settings)


def config_to_dict(config: Config) -> dict[str, Any]:
    """Return the resolved configuration as nested dictionaries, with secrets redacted."""
    return asdict(_make_writable(config))


def _make_writable(config: Config) -> Config:
    """Redact secrets; replace reward functions that were given as objects, and the task, by their
    names."""
    if config.data.task is not None:
        config = replace(config, data=replace(config.data, task=str(config.data.task)))
    reward, cost = config.reward, config.cost
    if cost is not None:
        cost = replace(cost, function=_name_functions(cost.function))
    reward = replace(reward, function=_name_functions(reward.function))
    return secrets.redact_secrets(replace(config, reward=reward, cost=cost))


def _name_functions(function: Any) -> Any:
    if isinstance(function, list | tuple):
        return [_name_functions(one) for one in function]
    if not callable(function):
        return function
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"


def _composed_for_rows(
    overrides: Sequence[SettingOverride], problems: ErrorCollector
) -> tuple[DictConfig, dict[str, Any], bool]:
    """Return the settings; those that the preset of a built-in task decides, with their values
    without it; and whether nobody has named any data. Then the data is the environment's tasks
    where there is an environment, and none where only sets of other data are evaluated."""
    chosen = dict(DEFAULT_PRESETS)
    for override in overrides:
        if override.is_preset:
            with problems.noted():
                chosen[override.key] = _resolve_preset_name(override)
    composed = _compose(chosen, overrides, problems)
    is_default = not any(_PLACE_OF_ROWS.fullmatch(override.key) for override in overrides)
    if is_default and _value(composed, "environment.name") is not None:
        return _compose({**chosen, DATA: "environment"}, overrides, ErrorCollector()), {}, False
    if load_preset(DATA, chosen[DATA])[DATA]["task"] is None:
        return composed, {}, False
    plain = _compose({**chosen, DATA: FILES}, overrides, ErrorCollector())
    if is_default and _value(plain, "model.path") is not None and _evaluates_only_sets(plain):
        return plain, {}, False
    instead = {}
    for name, _ in flatten_settings(load_preset(DATA, chosen[DATA])):
        value = _value(plain, name)
        if name != "data.task" and value != _value(composed, name):
            instead[name] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return composed, instead, is_default


def _value(config: DictConfig, name: str) -> Any:
    """Return a setting; None if it refers to what is not there."""
    return OmegaConf.select(config, name, throw_on_resolution_failure=False)


def _evaluates_only_sets(config: DictConfig) -> bool:
    """Return whether nothing is trained, and every set of `eval.sets` names data of its own."""
    sets = [one for one in config.eval.sets.values() if one is not None]
    has_data = [OmegaConf.is_config(one) and bool(one.get("data")) for one in sets]
    return _value(config, "trainer.name") == "evaluate" and bool(sets) and all(has_data)


def _compose(
    chosen: Mapping[str, str], overrides: Sequence[SettingOverride], problems: ErrorCollector
) -> DictConfig:
    """Compose defaults, presets and other overrides, in this order."""
    config = deepcopy(_compose_presets(tuple(chosen.items())))
    for override in overrides:
        if not override.is_preset:
            with problems.noted():
                _apply_override(config, override)
    return config


@cache
def _compose_presets(chosen: tuple[tuple[str, str], ...]) -> DictConfig:
    """Compose defaults and presets; cached, because tests and searches compose many
    configurations."""
    presets = [load_preset(group, name) for group, name in chosen]
    config = OmegaConf.merge(OmegaConf.structured(Config), *presets)
    assert isinstance(config, DictConfig)
    config.run.name = dict(chosen)["algorithm"]
    return config


def _explain_unresolved(config: DictConfig, error: OmegaConfBaseException) -> str:
    """Explain why a reference to another setting or to the environment cannot be resolved."""
    key = str(error.full_key)
    said = read_setting(OmegaConf.to_container(config), key)
    cause = str(error).splitlines()[0]
    if "could not be converted" in cause or "Cannot convert" in cause:
        return f"{key}={said}: what it refers to {describe_expected(find_setting_type(key))}."
    cause = cause.rpartition("resolving interpolation: ")[2].strip('"')
    return f"{key}={said}: {cause[:1].lower()}{cause[1:].removesuffix('.')}."


def _resolve_preset_name(override: SettingOverride) -> str:
    group, name = override.key, override.value
    if name in list_presets(group):
        return str(name)
    raise ConfigError(
        f"{group}={name}: there is no `{group}` called `{name}`; there are "
        f"{', '.join(list_presets(group))}."
        + (
            suggest_name(name, list_presets(group))
            if "," not in name
            else " For a job with each, add --multirun."
        )
    )


def _apply_override(config: DictConfig, override: SettingOverride) -> None:
    """Apply an override to the configuration."""
    key, value, hint = override.key, override.value, find_setting_type(override.key)
    if is_group(hint):
        _apply_group_override(config, override)
        return
    parts = key.split(".")
    parents = (".".join(parts[:end]) for end in range(1, len(parts)))
    groups = (one for one in parents if is_group(find_setting_type(one)))
    if absent := next((one for one in groups if OmegaConf.select(config, one) is None), None):
        presets = " or ".join(find_presets_setting(absent))
        raise ConfigError(
            f"{override.said}: `{absent}` is set by {presets}; choose that, or leave {key} out."
        )
    if value == "???" or (
        value is None and not is_optional(hint) and strip_annotations(hint) is not Any
    ):
        raise ConfigError(f"{override.said}: must have a value. Leave it out for the default.")
    if isinstance(value, dict) and (
        found := explain_wrong_type(hint, value)
    ):  # OmegaConf merges anything
        raise ConfigError(f"{override.said}: {found}.")
    try:
        is_mapping = OmegaConf.is_dict(OmegaConf.select(config, key))  # None cannot be merged with
        OmegaConf.update(config, key, value, merge=is_mapping, force_add=True)
    except GrammarParseError as error:
        raise ConfigError(
            f"{override.said}: `${{` begins a reference, such as ${{oc.env:NAME}}; write "
            rf"\${{ for the characters themselves. Here: {str(error).splitlines()[0]}."
        ) from None
    except OmegaConfBaseException:
        is_list = get_origin(strip_annotations(hint)) is list and not isinstance(value, list | dict)
        cure = f" {suggest_brackets(key, value)}" if is_list else ""
        raise ConfigError(f"{override.said}: {describe_expected(hint)}.{cure}") from None


def _apply_group_override(config: DictConfig, override: SettingOverride) -> None:
    """Apply an override that sets several settings of a group; null removes an optional group."""
    key, value = override.key, override.value
    if value is None and is_optional(find_setting_type(key)):
        OmegaConf.update(config, key, None, merge=False)
        return
    if not isinstance(value, dict):
        inner = [name for name in list_settings() if name.startswith(f"{key}.")]
        raise ConfigError(
            f"`{override.said}`: `{key}` is a group of settings; set {', '.join(inner)}."
        )
    problems = ErrorCollector()
    for name, entry in value.items():
        with problems.noted():
            check_setting_name(f"{key}.{name}")
            _apply_override(
                config, SettingOverride(f"{key}.{name}", entry, f"{key}.{name}={entry}")
            )
    problems.raise_if_any()
