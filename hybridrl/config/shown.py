"""The settings that count in a job, for a person to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from hybridrl.config.eval_sets import INHERITED
from hybridrl.config.schema import Config
from hybridrl.config.values import conditions, default_of, hints


def that_count(settings: Any, config: Config, prefix: str = "") -> dict[str, Any]:
    """A group of settings as nested dictionaries, without those at their default that do nothing
    in this job."""
    found: dict[str, Any] = {}
    for name, hint in hints(type(settings)).items():
        value = getattr(settings, name)
        if is_dataclass(value):
            if inner := that_count(value, config, f"{prefix}{name}."):
                found[name] = inner
        elif value != default_of(type(settings), name) or counts(hint, f"{prefix}{name}", config):
            found[name] = value
    return found


def idle(config: Config) -> list[str]:
    """A sentence for each setting that is not at its default and does nothing in this job."""
    return list(_idle(config, config))


def _idle(settings: Any, config: Config, prefix: str = "") -> Iterator[str]:
    for name, hint in hints(type(settings)).items():
        value, setting = getattr(settings, name), f"{prefix}{name}"
        if is_dataclass(value):
            yield from _idle(value, config, f"{setting}.")
        elif value != default_of(type(settings), name) and not counts(hint, setting, config):
            wanted = str(conditions(hint)).replace("`.", f"`{prefix}")
            yield f"{setting}={value} does nothing in this job: it counts with {wanted}."


def counts(hint: Any, setting: str, config: Config) -> bool:
    """Whether a setting does anything in this job; with a program of the user's any may."""
    said = conditions(hint)
    return said is None or any(_holds(one, setting, config) for one in said.conditions)


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
        value = getattr(value, part)
    yield value
    group, _, leaf = name.partition(".")
    if group != "data":
        return
    others = [*config.data.sources.values()]
    if setting.removeprefix("data.") in INHERITED:
        sets = [one for one in config.eval.sets.values() if isinstance(one, Mapping)]
        others += [one.get("data") for one in sets]
    yield from (one[leaf] for one in others if isinstance(one, Mapping) and leaf in one)
