"""What was set in a run: the settings that differ from the defaults, and from other runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from hybridrl.config.load import compose_config, to_plain
from hybridrl.config.presets import leaves

MOST_SHOWN = 300
"""Of a value, in characters."""
OF_EACH_RUN = ("run.name", "run.directory")
"""Differs always, and says nothing."""
_ABSENT = object()


def differences(
    settings: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """A row for each setting that is not what it is by default, in one of these runs.

    Args:
        settings: Of the run, nested; empty: nothing is known of them.
        others: Of other runs. With these, only what differs between the runs.

    Returns:
        `rows`: each `name`, `default`, and `values` of the run and of the others, as texts, and
        `against`: whether they are compared with each other.
    """
    runs = [dict(leaves(one)) for one in (settings, *others)]
    usual = defaults()
    rows = []
    for name in _names([*runs, usual]):
        values = [run.get(name, _ABSENT) for run in runs]
        if name in OF_EACH_RUN or all(value is _ABSENT for value in values):
            continue
        default = usual.get(name, _ABSENT)
        if others:
            is_shown = any(_text(value) != _text(values[0]) for value in values[1:])
        else:
            is_shown = _text(values[0]) != _text(default)
        if is_shown:
            rows.append(
                {
                    "name": name,
                    "default": _text(default),
                    "values": [_text(value) for value in values],
                }
            )
    return {"rows": rows, "against": bool(others)}


@cache
def defaults() -> Mapping[str, Any]:
    """All settings of a job of which nothing is said, by their dotted names."""
    return dict(leaves(to_plain(compose_config()[0])))


def _names(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run))


def _text(value: Any) -> str:
    if value is _ABSENT:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} …"
