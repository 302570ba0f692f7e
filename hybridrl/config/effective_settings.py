"""The settings that count in a job, for a person to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from hybridrl.config.eval_sets import INHERITED
from hybridrl.config.presets import DATA, leaves, names, preset
from hybridrl.config.schema import Config
from hybridrl.config.setting_types import conditions, default_of, hints


class _Setting(NamedTuple):
    """A setting of a job, and those of its conditions, in words, that do not hold there."""

    name: str
    value: Any
    is_default: bool
    lacks: Sequence[str]


def that_count(settings: Any, config: Config) -> dict[str, Any]:
    """A group of settings as nested dictionaries, without those at their default that do nothing
    in this job."""
    found: dict[str, Any] = {}
    for one in _settings(settings, config):
        if one.lacks and one.is_default:
            continue
        *groups, leaf = one.name.split(".")
        inner = found
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[leaf] = one.value
    return found


def idle(config: Config) -> list[str]:
    """A sentence for each setting that is not at its default and does nothing in this job, unless
    the preset of its task or of its engine says it."""
    chosen = {DATA: config.data.task, "rollout": config.rollout.engine}
    of_presets = [
        setting
        for group, name in chosen.items()
        if name in names(group)
        for setting in leaves(preset(group, str(name)))
    ]
    unread = [one for one in _settings(config, config) if one.lacks and not one.is_default]
    return [
        f"{name}={value} does nothing in this job: it counts with {' and '.join(lacks)}."
        for name, value, _, lacks in unread
        if (name, value) not in of_presets
    ]


def counts(setting: str, config: Config) -> bool:
    """Whether a setting may do something in this job."""
    return any(one.name == setting and not one.lacks for one in _settings(config, config))


def _settings(
    settings: Any, config: Config, prefix: str = "", of_group: Sequence[str] = ()
) -> Iterator[_Setting]:
    for name, hint in hints(type(settings)).items():
        value, setting = getattr(settings, name), f"{prefix}{name}"
        lacks = [*of_group, *_lacking(hint, setting, prefix, config)]
        if is_dataclass(value):
            yield from _settings(value, config, f"{setting}.", lacks)
        else:
            is_default = value == default_of(type(settings), name)
            yield _Setting(setting, value, is_default, lacks)


def _lacking(hint: Any, setting: str, prefix: str, config: Config) -> Iterator[str]:
    """The conditions that do not hold; with a program of the user's any may."""
    for said in conditions(hint):
        if not any(_holds(one, setting, config) for one in said.conditions):
            yield str(said).replace("`.", f"`{prefix}")


def _holds(condition: str, setting: str, config: Config) -> bool:
    name, equals, wanted = condition.partition("=")
    name, above, least = name.partition(">")
    if name.startswith("."):
        name = setting.rpartition(".")[0] + name
    for value in _values(name, setting, config):
        if above:
            holds = value > float(least)
        elif not equals:
            holds = bool(value)
        else:
            holds = ("null" if value is None else str(value)) == wanted or ":" in str(value)
        if holds:
            return True
    return False


def _values(name: str, setting: str, config: Config) -> Iterator[Any]:
    """A setting's value, and of one of `data` also those of the sources of a mixture; and of the
    sets of `eval.sets`, if they have what depends on it from the job."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    yield value
    group, _, leaf = name.partition(".")
    if group != "data":
        return
    others = [*config.data.sources.values()]
    if setting.removeprefix("data.") in INHERITED:
        sets = [one for one in config.eval.sets.values() if isinstance(one, Mapping)]
        others += [one.get("data") for one in sets]
    yield from (one[leaf] for one in others if isinstance(one, Mapping) and leaf in one)
