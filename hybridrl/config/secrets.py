"""Secrets among the settings: used by this job, and written down nowhere.

The options of reward functions and of the generation engine are free, so one of them may be the key
of a service. What is called `key`, `token`, `secret`, `password`, `credential`, `passphrase`,
`authorization` or `bearer`, or comes from a variable of the environment with such a name, is a
secret: `config.yaml`, checkpoints, trackers and the summary have `${oc.env:NAME}` in its place if
it was given so, else `***`. So have all settings in place of the password of a URL,
`https://user:password@host`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError

HIDDEN = "***"
"""What is written in place of a secret that was given as it is."""
_NAME = re.compile(
    r"(?:.*[_\W])?(?:api)?"
    r"(token|authorization|bearer|(key|secret|password|passwd|passphrase|credential)s?)",
    re.I,
)
_OF_TEXT = re.compile(r"(?:.*_)?(bos|eos|pad|unk|sep|cls|mask|stop|start|end)_tokens?", re.I)
_FREE = re.compile(
    r"(?:(?:eval\.sets\.[\w-]+\.)?reward\.options|cost\.options|rollout\.engine_options)\b"
)
_ENTRY = re.compile(r"(\b(\w+)\s*:\s*)(?!\s*['\"]?\$)([^,{}]+)")
_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*:)(?!\$\{)([^/\s]+)(?=@)")
"""The user, and the password, of a URL."""
_REFERENCE = re.compile(r"\$\{\s*oc\.env\s*:\s*(\w+)[^}]*\}")


class Secret(str):
    """A text that is used as any other, and shown by none of Python's ways of showing values.

    Attributes:
        written: What is written in its place.
    """

    written: str

    def __new__(cls, text: str, written: str = HIDDEN) -> Secret:
        found = super().__new__(cls, text)
        found.written = written
        return found

    def __repr__(self) -> str:
        return repr(self.written)

    def __reduce__(self) -> tuple[Any, ...]:
        return Secret, (str(self), self.written)

    def __str__(self) -> str:
        return str.__str__(self)


def is_secret(name: str) -> bool:
    """Whether something of this name is a secret."""
    return _NAME.fullmatch(name) is not None and _OF_TEXT.fullmatch(name) is None


def marked(config: Config, said: DictConfig) -> Config:
    """The settings with their secrets marked.

    Args:
        said: The same, with references that are not yet resolved.
    """
    references = OmegaConf.to_container(said, resolve=False)

    def mark(path: Sequence[Any], value: Any) -> Any:
        text = _at(references, path)
        found = _REFERENCE.search(text) if isinstance(text, str) else None
        if not isinstance(value, str):
            return value
        named = next((str(part) for part in reversed(path) if isinstance(part, str)), "")
        by_name = is_secret(named) or (found is not None and is_secret(found[1]))
        if by_name and _FREE.match(".".join(map(str, path))):
            return Secret(value, text if found is not None else HIDDEN)
        if _PASSWORD.search(value):
            return Secret(value, text if found is not None else _without_password(value))
        return value

    return _changed(config, mark)


def written(config: Config) -> Config:
    """The settings as they may be written down."""
    return _changed(config, lambda _, v: v.written if isinstance(v, Secret) else v)


def unmarked(config: Config) -> Config:
    """The settings with secrets as plain texts."""
    return _changed(config, lambda _, v: str.__str__(v) if isinstance(v, Secret) else v)


def as_given(config: Config, given: Config) -> Config:
    """The settings with their secrets written as others, where these are the same."""
    before: dict[tuple[Any, ...], Any] = {}
    _changed(given, lambda path, value: before.setdefault(tuple(path), value))

    def change(path: Sequence[Any], value: Any) -> Any:
        earlier = before.get(tuple(path))
        return earlier if isinstance(earlier, Secret) and earlier == value else value

    return _changed(config, change)


def check_known(config: Config, resumed: str) -> None:
    """Refuses a secret of which only `***` is known.

    Args:
        resumed: The setting by which a run is resumed, and its value.

    Raises:
        ConfigError: names the setting and how to give it.
    """

    def check(path: Sequence[Any], value: Any) -> Any:
        if isinstance(value, str) and (value == HIDDEN or hides_password(value)):
            key = ".".join(map(str, path))
            variable = str(path[-1]).upper()
            raise ConfigError(
                f"{resumed}: {key} is a secret, which the run's settings do not have. Give it "
                f"again: {key}=..., or '{key}=${{oc.env:{variable}}}', which is found again."
            )
        return value

    _changed(config, check)


def hides_password(text: str) -> bool:
    """Whether it is a URL with `***` in place of its password."""
    found = _PASSWORD.search(text)
    return found is not None and found[2] == HIDDEN


def command_line(arguments: Sequence[str]) -> list[str]:
    """A command line without the secrets in its `key=value` arguments."""
    return [_argument(argument) for argument in arguments]


def _argument(argument: str) -> str:
    argument = _without_password(argument)
    key, _, value = argument.partition("=")
    if not _FREE.match(key):
        return argument
    if is_secret(key.rpartition(".")[2]) and not _REFERENCE.fullmatch(value.strip("'\"")):
        return f"{key}={HIDDEN}"
    # Several at once: reward.options.score={api_key: ...}
    return _ENTRY.sub(lambda m: f"{m[1]}{HIDDEN}" if is_secret(m[2]) else m[0], argument)


def _without_password(text: str) -> str:
    return _PASSWORD.sub(rf"\1{HIDDEN}", text)


def _changed(config: Config, change: Callable[[Sequence[Any], Any], Any]) -> Config:
    """The settings with every value as `change` makes it of its place and itself."""
    return _walked((), config, change)  # type: ignore[no-any-return]


def _walked(path: tuple[Any, ...], value: Any, change: Callable[[Sequence[Any], Any], Any]) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        inner = {n: _walked((*path, n), getattr(value, n), change) for n in names}
        return replace(value, **inner)
    if isinstance(value, Mapping):
        return {key: _walked((*path, key), entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_walked((*path, place), entry, change) for place, entry in enumerate(value)]
    return change(path, value)


def _at(settings: Any, path: Sequence[Any]) -> Any:
    for part in path:
        try:
            settings = settings[part]
        except (KeyError, IndexError, TypeError):
            return settings if isinstance(settings, str) else None
    return settings
