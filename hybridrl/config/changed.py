"""Reading and changing settings by their dotted names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridrl.config.schema import Config

Setting = tuple[str, Any]


def read_setting(settings: Any, name: str) -> Any:
    """Return a setting of a configuration, or of its form as nested dictionaries; None if it, or a
    group that it is in, is null or not there."""
    for part in name.split("."):
        is_mapping = isinstance(settings, Mapping)
        settings = settings.get(part) if is_mapping else getattr(settings, part, None)
    return settings


def apply_changes(config: Config, settings: Iterable[Setting]) -> Config:
    """The configuration with these settings; objects in it, such as reward functions, stay the
    same ones."""
    for name, value in settings:
        config = _with(config, name.split("."), value)
    return config


def _with(place: Any, names: Sequence[str], value: Any) -> Any:
    name, *inner = names
    if isinstance(place, dict):  # some hold what they are given names of, such as `models`
        return {**place, name: _with(place.get(name, {}), inner, value) if inner else value}
    return replace(place, **{name: _with(getattr(place, name), inner, value) if inner else value})
