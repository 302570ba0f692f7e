"""Composing a job's configuration from the YAML files here and `key=value` overrides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.model_start import with_model_folders
from hybridrl.config.recipe import expand
from hybridrl.config.resumed_settings import with_settings_of_run
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, nearest

FOLDER = Path(__file__).parent
GROUPS = ("algorithm", "data", "placement", "rollout")
OPEN = re.compile(
    r"((reward|cost)\.options|algorithm\.loss_options|placement\.roles|models"
    r"|rollout\.engine_options)[.=]"
)
"""Settings below which any name may stand: the user's, those of a loss, roles, or vLLM's; checked
with them."""

ConfigStore.instance().store(name="schema", node=Config)


def load_config(overrides: Sequence[str] = ()) -> Config:
    """The typed configuration of a job. With `resume` it is that of the resumed run, but for what
    the overrides say.

    Args:
        overrides: As on the command line, for example `["data=jsonl", "data.path=prompts.jsonl"]`
            or `["recipe=my.yaml"]`.

    Raises:
        ConfigError: for an unknown key (names the nearest), a value of the wrong type, or a value
            that has to be given.
    """
    overrides = expand(overrides)
    _check_preset_groups(overrides)
    _check_open(overrides)
    added = [f"++{o}" if OPEN.match(o) and "=" in o else o for o in overrides]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(FOLDER), version_base=None):
            composed = to_config(compose("config", overrides=added))
    except (HydraException, OmegaConfBaseException) as error:
        cause = f"{error}\n{error.__cause__ or ''}"
        raise ConfigError(_explain(cause, overrides)) from None
    return with_settings_of_run(composed, overrides)


def to_config(config: DictConfig) -> Config:
    """The dataclasses behind a composed configuration, with model folders in place of runs."""
    found = OmegaConf.to_object(config)
    if not isinstance(found, Config):
        raise ConfigError("The configuration is not of the schema's type; start from config.yaml.")
    return with_model_folders(found)


def to_yaml(config: Config) -> str:
    """The resolved configuration as it is written to `config.yaml` of the run."""
    return OmegaConf.to_yaml(OmegaConf.structured(_named(config)))


def to_plain(config: Config) -> dict[str, Any]:
    """The resolved configuration as nested dictionaries."""
    return asdict(_named(config))


def _named(config: Config) -> Config:
    """With the names of reward functions that were given as objects."""
    reward, cost = config.reward, config.cost
    if cost is not None:
        cost = replace(cost, function=_names(cost.function))
    return replace(config, reward=replace(reward, function=_names(reward.function)), cost=cost)


def _names(function: Any) -> Any:
    if isinstance(function, list | tuple):
        return [_names(one) for one in function]
    if not callable(function):
        return function
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"


def leaves(schema: Any, prefix: str = "") -> list[str]:
    """The dotted names of all settings, of groups too that are null until a preset sets them."""
    names: list[str] = []
    unset = _preset_groups(schema)
    for field in fields(schema):
        value = unset.get(field.name, getattr(schema, field.name))
        name = f"{prefix}{field.name}"
        names += leaves(value, f"{name}.") if is_dataclass(value) else [name]
    return names


def _preset_groups(schema: Any) -> dict[str, Any]:
    """The groups of settings that are null in `schema`, with their defaults."""
    kinds = get_type_hints(type(schema))
    return {
        field.name: kind()
        for field in fields(schema)
        if getattr(schema, field.name) is None
        for kind in get_args(kinds[field.name])
        if is_dataclass(kind)
    }


def _check_open(overrides: Sequence[str]) -> None:
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key == "rollout.engine_options" and value and not value.startswith("{"):
            raise ConfigError(
                f"{override}: must be a dictionary. Or set one option, as in "
                f"{key}.max_num_batched_tokens=4096."
            )


def _check_preset_groups(overrides: Sequence[str]) -> None:
    """Refuses settings of a group that no override creates: Hydra would fail without a sentence."""
    for group in _preset_groups(Config()):
        mine = [o for o in overrides if re.match(rf"\+*{group}[.=]", o) and o != f"{group}=null"]
        presets = [f"algorithm={name}" for name in _presets_with(group)] if mine else []
        if not mine or any(preset in overrides for preset in presets):
            continue
        key = mine[0].split("=", 1)[0].lstrip("+")
        known = [group, *(name for name in leaves(Config()) if name.startswith(f"{group}."))]
        if key not in known and not OPEN.match(key):
            raise ConfigError(f"There is no setting `{key}`.{_nearest_setting(key, known)}")
        raise ConfigError(
            f"{mine[0]}: `{group}` is set by {' or '.join(presets)}; choose that, or leave {key} "
            "out."
        )


def _presets_with(group: str) -> list[str]:
    """The algorithm files that set something in `group`."""
    paths = sorted((FOLDER / "algorithm").glob("*.yaml"))
    return [path.stem for path in paths if group in (yaml.safe_load(path.read_text()) or {})]


def _explain(text: str, overrides: Sequence[str]) -> str:
    """Hydra's words, as a sentence of ours that names the setting and the nearest known one."""
    known = leaves(Config())
    null = [f"{group}=null" for group in _preset_groups(Config())]
    for override in (o for o in overrides if o not in null):
        key = override.split("=", 1)[0].lstrip("+~").split("@")[0]
        if "=" not in override:
            return (
                f"`{override}` is not an override; write key=value, for example trainer.steps=20."
            )
        if key in GROUPS:
            choices = sorted(path.stem for path in (FOLDER / key).glob("*.yaml"))
            choice = override.split("=", 1)[1]
            if choice not in choices:
                return (
                    f"{override}: there is no `{key}` called `{choice}`; there are "
                    f"{', '.join(choices)}.{nearest(choice, choices)}"
                )
        elif key not in known and not key.startswith("hydra") and not OPEN.match(key):
            if any(name.startswith(f"{key}.") for name in known):
                if override.split("=", 1)[1].startswith("{"):
                    continue  # several settings of the group at once
                inner = [name for name in known if name.startswith(f"{key}.")]
                return f"`{override}`: `{key}` is a group of settings; set {', '.join(inner)}."
            return f"There is no setting `{key}`.{_nearest_setting(key, known)}"
        elif "sweep" in text.lower() and "," in override.split("=", 1)[1] and "[" not in override:
            value = override.split("=", 1)[1]
            return f"{override}: write a list in brackets, as in '{key}=[{value}]'."
    lines = text.strip().splitlines()
    key = re.search(r"full_key: (\S+)", text)
    if key and "is not Optional" in text:
        return f"{key.group(1)}=null: must have a value. Leave it out for the default."
    said = ("Value '", "Cannot convert")
    cause = next((line for line in lines if line.startswith(said)), lines[0])
    return f"{key.group(1)}: {cause}" if key else cause


def _nearest_setting(key: str, known: list[str]) -> str:
    """By the whole name, or by its last word wherever that stands."""
    if close := nearest(key, known):
        return close
    last = key.rsplit(".", 1)[-1]
    same = [name for name in known if name.rsplit(".", 1)[-1] == last]
    return f" Did you mean `{same[0]}`?" if same else " `--cfg job` shows all settings."
