"""The settings that have an effect in a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any, NamedTuple

from hybridrl.config.changed import read_setting
from hybridrl.config.constraints import AppliesIf
from hybridrl.config.eval_schema import INHERITED_DATA_SETTINGS
from hybridrl.config.presets import DATA, flatten_settings, list_presets, load_preset
from hybridrl.config.schema import Config
from hybridrl.config.setting_types import (
    find_condition,
    find_default,
    is_group,
    read_type_hints,
    strip_annotations,
)


class _Setting(NamedTuple):
    """A setting of a job, and those of its conditions, in words, that do not hold there."""

    name: str
    value: Any
    is_default: bool
    lacks: Sequence[str]


def select_effective_settings(settings: Any, config: Config) -> dict[str, Any]:
    """Select the settings of a group that are set or have an effect in this job, as nested
    dictionaries."""
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


def find_ineffective_settings(config: Config) -> list[str]:
    """Return a sentence for each setting that is not at its default and does nothing in this job,
    unless the preset of its task or of its engine says it."""
    chosen = {DATA: config.data.task, "rollout": config.rollout.engine}
    of_presets = [
        setting
        for group, name in chosen.items()
        if name in list_presets(group)
        for setting in flatten_settings(load_preset(group, str(name)))
    ]
    unread = [one for one in _settings(config, config) if one.lacks and not one.is_default]
    return [
        f"{name}={value} does nothing in this job: it counts with {' and '.join(lacks)}."
        for name, value, _, lacks in unread
        if (name, value) not in of_presets
    ]


def is_effective(setting: str, config: Config) -> bool:
    """Return whether a setting may do something in this job."""
    return any(one.name == setting and not one.lacks for one in _settings(config, config))


TRAINER = "trainer.name="
"""How a condition begins that names a trainer."""


def trainer_settings(*trainers: str) -> frozenset[str]:
    """Return what any of these built-in trainers reads, of the settings, and groups of them, that
    not every trainer does."""
    tied = _tied_to_trainers(Config)
    return frozenset(n for n in tied if any(_may_read(one, n) for one in trainers))


def unread(config: Config, uses: frozenset[str]) -> Iterator[tuple[str, Any, str]]:
    """Yield what is set away from its default, is read by some trainers only, and not by one that
    uses these settings: its name, its value, and the trainers that read it, in words. Settings of a
    group that every job has are left out: `find_ineffective_settings` tells of them."""
    for name, said in _tied_to_trainers(Config).items():
        groups, _, leaf = name.rpartition(".")
        group = read_setting(config, groups) if groups else config
        if group is None or name in uses:
            continue
        value, default = getattr(group, leaf), find_default(type(group), leaf)
        if value != default and (default is None or not is_dataclass(value)):
            shown = "..." if is_dataclass(value) else value
            shown = str(value).lower() if isinstance(value, bool) else shown
            yield name, shown, " and ".join(map(str, said))


@cache
def _tied_to_trainers(group: type, prefix: str = "") -> Mapping[str, Sequence[AppliesIf]]:
    """Return the conditions that name trainers, by setting or group that has some."""
    found: dict[str, Sequence[AppliesIf]] = {}
    for name, hint in read_type_hints(group).items():
        said = [one for one in find_condition(hint) if TRAINER in " ".join(one.conditions)]
        found |= {f"{prefix}{name}": said} if said else {}
        if is_group(hint):
            found |= _tied_to_trainers(strip_annotations(hint), f"{prefix}{name}.")
    return found


def _may_read(trainer: str, name: str) -> bool:
    """Return whether a setting can count with a trainer, whatever the other settings are."""
    tied, parts = _tied_to_trainers(Config), name.split(".")
    names = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return all(
        any(
            one == f"{TRAINER}{trainer}"
            or (not one.startswith(TRAINER) and _may_read(trainer, one.partition("=")[0]))
            for one in said.conditions
        )
        for each in names
        for said in tied.get(each, ())
    )


def _settings(
    settings: object, config: Config, prefix: str = "", of_group: Sequence[str] = ()
) -> Iterator[_Setting]:
    for name, hint in read_type_hints(type(settings)).items():
        value, setting = getattr(settings, name), f"{prefix}{name}"
        lacks = [*of_group, *_lacking(hint, setting, prefix, config)]
        if is_dataclass(value):
            yield from _settings(value, config, f"{setting}.", lacks)
        else:
            is_default = value == find_default(type(settings), name)
            yield _Setting(setting, value, is_default, lacks)


def _lacking(hint: Any, setting: str, prefix: str, config: Config) -> Iterator[str]:
    """Yield the conditions that do not hold, in words. A program of the user's may read any
    setting."""
    for said in find_condition(hint):
        if not any(_condition_holds(one, setting, config) for one in said.conditions):
            yield str(said).replace("`.", f"`{prefix}")


def _condition_holds(condition: str, setting: str, config: Config) -> bool:
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
    yield read_setting(config, name)
    group, _, leaf = name.partition(".")
    if group != "data":
        return
    others = [*config.data.sources.values()]
    if setting.removeprefix("data.") in INHERITED_DATA_SETTINGS:
        sets = [one for one in config.eval.sets.values() if isinstance(one, Mapping)]
        others += [one.get("data") for one in sets]
    yield from (one[leaf] for one in others if isinstance(one, Mapping) and leaf in one)
