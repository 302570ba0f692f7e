"""Secrets among settings: available to the job, redacted wherever settings are written.

The options of reward functions, environments and the generation engine are free, so one of them
may be the key of a service. What is called `key`, `token`, `secret`, `password`, `credential`,
`passphrase`, `authorization` or `bearer`, or comes from a variable of the environment with such a
name, is a secret: `config.yaml`, checkpoints, trackers and the summary have `${oc.env:NAME}` in its
place if it was given so, else `***`. So have all settings in place of the passwords, tokens and
signatures in URLs. What else leaves the process goes through `system.redaction`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.system.redaction import (
    ENTRY,
    HIDDEN,
    REFERENCE,
    is_secret_name,
    redact,
    register_secret,
    url_secrets,
    without_url_secrets,
)

_Path = tuple[Any, ...]
_FREE = re.compile(
    r"(?:(?:eval\.sets\.[\w-]+\.)?reward\.options|cost\.options|rollout\.engine_options"
    r"|environment\.options|models\.\w+|data\.(?:sources\.[\w-]+\.)?(?:task|sampler)_options)\b"
)


class SecretStr(str):
    """A text that behaves as any other string but is redacted in `repr` and wherever settings are
    written.

    Attributes:
        written: What is written in its place.
    """

    written: str

    def __new__(cls, text: str, written: str = HIDDEN) -> SecretStr:
        found = super().__new__(cls, text)
        found.written = written
        for secret in url_secrets(text) or [text]:
            register_secret(secret)
        return found

    def __repr__(self) -> str:
        return repr(self.written)

    def __reduce__(self) -> tuple[Any, ...]:
        return SecretStr, (str(self), self.written)


def mark_secrets(config: Config, said: DictConfig) -> Config:
    """Mark the secrets among the settings.

    Args:
        said: The same, with references that are not yet resolved.
    """
    references = OmegaConf.to_container(said, resolve=False)

    def mark(path: _Path, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        text = _read_nested(references, path)
        found = REFERENCE.search(text) if isinstance(text, str) else None
        if _is_named(path) or (found is not None and is_secret_name(found[1])):
            return SecretStr(value, text if found is not None else HIDDEN)
        if url_secrets(value):
            return SecretStr(value, text if found is not None else without_url_secrets(value))
        return value

    return _map_values(config, mark)


def redact_secrets(config: Config) -> Config:
    """Replace marked secrets by what may be written in their place."""

    def write(path: _Path, value: Any) -> Any:
        if isinstance(value, SecretStr):
            return value.written
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_hidden = is_number and _is_named(path)  # or the same text, in another place
        return HIDDEN if is_hidden or (type(value) is str and redact(value) == HIDDEN) else value

    return _map_values(config, write)


def _is_named(path: _Path) -> bool:
    """Return whether a free option is a secret by its name."""
    named = next((str(part) for part in reversed(path) if isinstance(part, str)), "")
    return is_secret_name(named) and _FREE.match(".".join(map(str, path))) is not None


def reveal_secrets(config: Config) -> Config:
    """Replace marked secrets by plain strings."""
    return _map_values(config, lambda _, v: str(v) if isinstance(v, SecretStr) else v)


def copy_secret_references(config: Config, given: Config) -> Config:
    """Mark secrets as in `given`, where both have the same values, so that references such as
    `${oc.env:NAME}` are kept."""
    before: dict[_Path, Any] = {}
    _map_values(given, before.setdefault)

    def change(path: _Path, value: Any) -> Any:
        earlier = before.get(path)
        return earlier if isinstance(earlier, SecretStr) and earlier == value else value

    return _map_values(config, change)


def check_redacted_secrets(config: Config, resumed: str) -> None:
    """Refuse a secret whose stored value is only `***`.

    Args:
        resumed: The setting by which a run is resumed, and its value.

    Raises:
        ConfigError: names the setting and how to give it.
    """

    def check(path: _Path, value: Any) -> Any:
        if isinstance(value, str) and (value == HIDDEN or has_redacted_password(value)):
            key = ".".join(map(str, path))
            variable = str(path[-1]).upper()
            raise ConfigError(
                f"{resumed}: {key} is a secret, which the run's settings do not have. Give it "
                f"again: {key}=..., or '{key}=${{oc.env:{variable}}}', which is found again."
            )
        return value

    _map_values(config, check)


def has_redacted_password(text: str) -> bool:
    """Return whether a URL has `***` in place of its password."""
    return HIDDEN in url_secrets(text)


def redact_command_line(arguments: Sequence[str]) -> list[str]:
    """Redact the secrets of `key=value` arguments."""
    return list(map(_redact_argument, arguments))


def _redact_argument(argument: str) -> str:
    argument = without_url_secrets(argument)
    key, _, value = argument.partition("=")
    if not _FREE.match(key):
        return argument
    if is_secret_name(key.rpartition(".")[2]) and not REFERENCE.fullmatch(value.strip("'\"")):
        return f"{key}={HIDDEN}"
    # Several at once: reward.options.score={api_key: ...}
    return ENTRY.sub(lambda m: f"{m[1]}{HIDDEN}" if is_secret_name(m[2]) else m[0], argument)


def _map_values(config: Config, change: Callable[[_Path, Any], Any]) -> Config:
    """Apply a function to every value of the settings, given its path and itself."""
    return _map_nested_values(config, change)  # type: ignore[no-any-return]


def _map_nested_values(value: Any, change: Callable[[_Path, Any], Any], path: _Path = ()) -> Any:
    def inner(name: Any, entry: Any) -> Any:
        return _map_nested_values(entry, change, (*path, name))

    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{name: inner(name, getattr(value, name)) for name in names})
    if isinstance(value, Mapping):
        return {key: inner(key, entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [inner(place, entry) for place, entry in enumerate(value)]
    return change(path, value)


def _read_nested(settings: Any, path: _Path) -> Any:
    for part in path:
        try:
            settings = settings[part]
        except (KeyError, IndexError, TypeError):
            return settings if isinstance(settings, str) else None
    return settings
