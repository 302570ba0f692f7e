"""Parsing of the command line: `key=value`, recipes, and sweeps of several jobs.

A value of a setting that is text is taken as it stands, whatever characters it has; quotes around
the whole of it are left away. Others are read by Hydra's grammar: numbers, `true`, `null`,
`[a, b]`, `{a: 1}`. Values may name variables of the environment, `${oc.env:NAME}`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from hybridrl.composition.setting_names import check_setting_name, is_open_setting, list_settings
from hybridrl.config.presets import DEFAULT_PRESETS
from hybridrl.config.schema import Config
from hybridrl.config.setting_types import (
    describe_expected,
    is_optional,
    read_type_hints,
    strip_annotations,
)
from hybridrl.errors import ConfigError, ErrorCollector
from hybridrl.system.redaction import register_secrets

_PARSER = OverridesParser.create()
RECIPE_KEY = "recipe"
"""`recipe=<file>` stands for the settings in the file; what follows it wins."""


@dataclass(frozen=True)
class SettingOverride:
    """An override of one setting.

    Attributes:
        key: Dotted.
        value: As YAML would have it.
        said: As the user wrote it.
    """

    key: str
    value: Any
    said: str

    @property
    def is_preset(self) -> bool:
        """True if the override chooses a preset."""
        return self.key in DEFAULT_PRESETS


def parse_overrides(arguments: Sequence[str], problems: ErrorCollector) -> list[SettingOverride]:
    """Parse command-line arguments to overrides, with recipes expanded in place.

    Args:
        problems: Gets what is said of arguments that are none.
    """
    found: list[SettingOverride] = []
    for argument in arguments:
        register_secrets(argument)
        with problems.noted():
            found += _parse_override(argument, arguments)
    with problems.noted():
        _check_repeated_presets(arguments)
    return found


def find_setting_type(key: str) -> Any:
    """Return the type of a setting, of a group, or of the entries of an open setting."""
    hint: Any = Config
    for name in key.split("."):
        group = strip_annotations(hint)
        if is_dataclass(group):
            hint = read_type_hints(group)[name]  # type: ignore[arg-type]
        else:
            hint = (*get_args(group), Any, Any)[1]
    return hint


def suggest_brackets(key: str, text: str) -> str:
    """Suggest writing a list in brackets."""
    return f"Write it in brackets: '{key}=[{text}]'."


def _parse_override(argument: str, arguments: Sequence[str]) -> list[SettingOverride]:
    key, equals, text = argument.partition("=")
    if key.startswith("~"):
        name = key.removeprefix("~")
        none = f", or write {name}=null" if is_optional(list_settings().get(name)) else ""
        raise ConfigError(
            f"{argument}: no setting can be taken away. For its default leave it out{none}."
        )
    if not equals:
        raise ConfigError(
            f"`{argument}` is not an override; write key=value, for example trainer.steps=20."
        )
    key = re.sub(r"^\+{1,2}", "", key).strip()
    if key == RECIPE_KEY:
        return _expand_recipe(Path(text))
    check_setting_name(key, text, arguments)
    value = text if key in DEFAULT_PRESETS else _parse_value(key, text)
    return [SettingOverride(key, value, f"{key}={text}")]


def _expand_recipe(path: Path) -> list[SettingOverride]:
    settings, problems = _read_recipe(path), ErrorCollector()
    for name in settings:
        with problems.noted():
            check_setting_name(name)
    try:
        problems.raise_if_any()
    except ConfigError as error:
        raise ConfigError(*(f"recipe={path}: {said}" for said in error.problems)) from None
    return [SettingOverride(name, value, f"{name}={value}") for name, value in settings.items()]


def _read_recipe(path: Path) -> dict[str, Any]:
    """Read the settings of a recipe, by dotted name.

    Raises:
        ConfigError: if the file is missing, or is not a flat mapping of settings.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
        register_secrets(text)
        settings = yaml.safe_load(text)
    except (OSError, UnicodeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(
            f"recipe={path} could not be read: {why}. Name a file of settings."
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # without the line itself: it may be a secret
        place = "" if mark is None else f" in line {mark.line + 1}"
        why = getattr(error, "problem", None) or "it cannot be read"
        raise ConfigError(f"recipe={path} is not YAML{place}: {why}.") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"recipe={path} must hold lines such as `trainer.steps: 100`.")
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            raise ConfigError(
                f"recipe={path}: write `{key}.{next(iter(value))}: ...` on a line of its own; a "
                "recipe is flat, like the command line."
            )
    return {str(key): value for key, value in settings.items()}


def _parse_value(key: str, text: str) -> Any:
    hint = find_setting_type(key)
    kind = strip_annotations(hint)
    if kind is str:
        return None if text == "null" else _strip_quotes(text)
    try:
        parsed = _PARSER.parse_override(f"key={text}")
    except HydraException:
        return _parse_yaml_value(text)
    if kind is Any or is_open_setting(key):
        value = text if parsed.is_sweep_override() else parsed.value()
        return _strip_quotes(text) if isinstance(value, str) else value
    if parsed.is_sweep_override():
        single = get_origin(kind) is not list
        cure = "For a job with each, add --multirun." if single else suggest_brackets(key, text)
        raise ConfigError(f"{key}={text}: {describe_expected(hint)}. {cure}")
    return parsed.value()


def _parse_yaml_value(text: str) -> Any:
    """Parse lists and dictionaries that Hydra's grammar does not accept, such as `[</s>]`; else
    return the text."""
    if text[:1] + text[-1:] in ("[]", "{}"):
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            pass
    return text


def _strip_quotes(text: str) -> str:
    """Strip quotes around the whole text."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        try:
            value = _PARSER.parse_override(f"key={text}").value()
        except HydraException:
            return text
        return str(value)
    return text


def _check_repeated_presets(arguments: Sequence[str]) -> None:
    """Refuse two presets of one group on a command line, because the first would be ignored; a
    preset of a recipe may be replaced."""
    for group in DEFAULT_PRESETS:
        chosen = list(dict.fromkeys(a for a in arguments if a.lstrip("+").startswith(f"{group}=")))
        if len(chosen) > 1:
            raise ConfigError(
                f"{' '.join(chosen)}: a job has one `{group}`. Leave one of them out, or add "
                f"--multirun and write {group}={','.join(one.split('=', 1)[1] for one in chosen)} "
                "for a job with each."
            )


def expand_sweep(arguments: Sequence[str]) -> list[list[str]]:
    """Expand a command line to the overrides of each job, the product of all listed values. Commas
    separate values outside of quotes and brackets; `range(first, end)` yields integers.

    Raises:
        ConfigError: for functions of Hydra's other than `choice` and `range`.
    """
    return [list(chosen) for chosen in itertools.product(*map(_list_choices, arguments))]


def _list_choices(argument: str) -> list[str]:
    key, _, text = argument.partition("=")
    try:
        parsed = _PARSER.parse_override(argument)
    except HydraException:  # characters that only text has
        is_whole = text[:1] in ("'", '"', "[", "{")
        return [argument] if is_whole else [f"{key}={value.strip()}" for value in text.split(",")]
    if not parsed.is_sweep_override():
        return [argument]
    try:
        return [f"{key}={value}" for value in parsed.sweep_string_iterator()]
    except (HydraException, AssertionError) as error:  # `glob` and `interval`
        raise ConfigError(
            f"{argument}: a sweep has values with commas between, or range(1, 4)."
        ) from error
