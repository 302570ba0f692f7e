"""The settings of one role's model, `models.<role>`: `path`, `parallel`, `optimizer`,
`precision`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.changed import read_setting
from hybridrl.config.constraints import PositiveInt, Seconds
from hybridrl.config.schema import Config, OptimizerConfig, ParallelConfig
from hybridrl.config.setting_types import describe_expected, find_invalid_values, read_type_hints
from hybridrl.errors import ConfigError, suggest_name

_Settings = TypeVar("_Settings")


@dataclass
class RemoteModelConfig:
    """The settings of a role whose model a server has, with the interface of OpenAI's completions.

    Attributes:
        url: Of the interface, such as `http://host:8000/v1`.
        model: Its name there; None: the server has one.
        tokenizer: Folder or hub name; None: the policy's.
        api_key: Sent with every request; None: none is.
        timeout: Of a request with all its attempts, in seconds.
        concurrency: Requests of a rank at a time.
    """

    url: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    api_key: str | None = None
    timeout: Seconds = 300.0
    concurrency: PositiveInt = 16


@dataclass(frozen=True)
class RoleModelConfig:
    """The settings of one role's model."""

    path: str | None = None
    parallel: ParallelConfig | None = None
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    further: Mapping[str, Any] = field(default_factory=dict)
    precision: str | None = None

    def optimizer_of(self, actor: OptimizerConfig) -> OptimizerConfig:
        """Return the actor's optimizer settings with this role's changes applied."""
        return replace(actor, **self.optimizer)


def parse_role_model(config: Config, role: str) -> RoleModelConfig:
    """Parse the settings of a role's model.

    Raises:
        ConfigError: for a name or a value that is none.
    """
    name, read = f"models.{role}", config.models.get(role)
    if read is None:
        return RoleModelConfig()
    if not isinstance(read, Mapping):
        raise ConfigError(
            f"{name}={read}: is a group of settings; set path, parallel or optimizer in it."
        )
    path, parallel, optimizer = read.get("path"), read.get("parallel"), read.get("optimizer")
    if path is not None and not isinstance(path, str):
        raise ConfigError(f"{name}.path={path}: must be a folder or a hub name.")
    precision = read.get("precision")
    if precision is not None and not (isinstance(precision, str) and precision):
        raise ConfigError(
            f"{name}.precision={precision}: must be a file of `hybridrl plan precision`."
        )
    changes: Mapping[str, Any] = {}
    if parallel is not None:
        parallel = parse_group(f"{name}.parallel", ParallelConfig(), parallel)
    if optimizer is not None:
        checked = parse_group(f"{name}.optimizer", config.actor.optimizer, optimizer)
        changes = {key: getattr(checked, key) for key in optimizer}
    known = ("path", "parallel", "optimizer", "precision")
    further = {key: value for key, value in read.items() if key not in known}
    return RoleModelConfig(path, parallel, changes, further, precision)


def list_parallel_settings(config: Config) -> dict[str, ParallelConfig]:
    """Return the parallel settings by the group that sets them: `actor`, `models.<role>`."""
    cuts = {f"models.{role}": parse_role_model(config, role).parallel for role in config.models}
    return {"actor": config.actor.parallel} | {name: cut for name, cut in cuts.items() if cut}


def list_model_paths(config: Config) -> dict[str, str | None]:
    """Return the paths of all models that the settings may name, by setting."""
    paths = {"model.path": config.model.path, "model.tokenizer": config.model.tokenizer}
    for role in config.models:
        paths[f"models.{role}.path"] = read_setting(config, f"models.{role}.path")
    for kind, scores in (("reward", config.reward), ("cost", config.cost)):
        if scores is not None:
            paths |= {f"{kind}.model": scores.model, f"{kind}.judge.path": scores.judge.path}
    return paths


def parse_group(name: str, defaults: _Settings, read: Any) -> _Settings:
    """Parse a mapping to a group of settings over its defaults, with types and constraints checked.

    Raises:
        ConfigError: for a name that is not known, or a value of another type or out of range.
    """
    check_group_names(name, read, [f.name for f in fields(defaults)])  # type: ignore[arg-type]
    found: Any = OmegaConf.structured(defaults)
    for key, value in read.items():
        try:
            found[key] = value
        except OmegaConfBaseException:
            kind = describe_expected(read_type_hints(type(defaults))[key])
            raise ConfigError(f"{name}.{key}={value}: {kind}.") from None
    settings: Any = OmegaConf.to_object(found)
    wrong = dict(find_invalid_values(settings, f"{name}."))
    if said := [
        wrong[setting] for setting in (f"{name}.{key}" for key in read) if setting in wrong
    ]:
        raise ConfigError(*said)
    return settings  # type: ignore[no-any-return]


def check_group_names(name: str, read: Any, known: Iterable[str]) -> None:
    """Refuse a value that is not a group of settings, and unknown names in it.

    Raises:
        ConfigError: naming the nearest.
    """
    known = list(known)
    if not isinstance(read, Mapping):
        raise ConfigError(f"{name}={read}: is a group of settings; set {', '.join(known)} in it.")
    for key in read:
        if key not in known:
            raise ConfigError(
                f"There is no setting `{name}.{key}`; there are {', '.join(known)}."
                f"{suggest_name(str(key), known)}"
            )
