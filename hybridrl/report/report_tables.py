"""A table of peak device memory, measured against the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hybridrl.composition.load import compose_config, config_to_dict
from hybridrl.config.presets import flatten_settings
from hybridrl.errors import HybridRLError
from hybridrl.planner.what_if.recorded_run import load_recorded_job
from hybridrl.run_files.run_reader import RunReader

_GIB = 2**30
_NAME, _PEAK = "memory/", "_peak_gib"


class PlannedMemory(NamedTuple):
    """Planned memory in GiB by role and phase, the device's memory, and a note if there is no
    plan."""

    phases: Mapping[tuple[str, str], float] = {}
    device: float | None = None
    note: str = ""


def build_memory_table(rows: Sequence[Mapping[str, Any]], planned: PlannedMemory) -> dict[str, Any]:
    """Build the memory table."""
    seen: dict[tuple[str, str], float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(_NAME) and name.endswith(_PEAK):
                role, _, phase = name.removeprefix(_NAME).removesuffix(_PEAK).partition("/")
                seen[role, phase] = max(seen.get((role, phase), 0.0), value)
    return {
        "rows": [
            {"role": key[0], "phase": key[1], "seen": peak, "planned": planned.phases.get(key)}
            for key, peak in sorted(seen.items(), key=lambda one: -one[1])
        ],
        "device": planned.device,
        "note": planned.note if seen else "",
    }


def replan_memory(run: RunReader) -> PlannedMemory:
    """Plan the run's memory again from its stored settings and devices."""
    try:
        config, cluster, placement = load_recorded_job(run.path)
    except (HybridRLError, OSError, ValueError, KeyError, TypeError):
        return PlannedMemory(note="Settings or devices of the run are not there: no plan.")
    folder = Path(str(config.model.path))
    if not (folder / "config.json").is_file():
        return PlannedMemory(note=f"The model's folder, {folder}, is not here: no plan.")
    if ":" in str(config.trainer.name):  # a report runs no program that a run's settings name
        return PlannedMemory(
            note=f"trainer.name={config.trainer.name} is a program of its own: no plan."
        )
    from hybridrl.planner.job_plan import build_job_plan
    from hybridrl.planner.machine.device_catalog import add_device_memory

    try:
        plan = build_job_plan(config, add_device_memory(cluster), placement)
        device = plan.cluster.memory_of(0) / _GIB
    except Exception as error:  # of any library that looks at the model: the rest can be shown
        return PlannedMemory(note=f"No plan: {type(error).__name__}: {str(error)[:200]}")
    found: dict[tuple[str, str], float] = {}
    for devices in plan.memory:
        for phase in devices.phases:
            key = phase.role, phase.phase
            found[key] = max(found.get(key, 0.0), phase.bytes / _GIB)
    return PlannedMemory(found, device)


MOST_SHOWN = 300
"""Of a value, in characters."""
OF_EACH_RUN = ("run.name", "run.directory")
"""Differs always, and says nothing."""
_ABSENT = object()


def differences(
    settings: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Build a row for each setting that differs from its default, or between the runs if others are
    given.

    Args:
        settings: Of the run, nested; empty: nothing is known of them.
        others: Of other runs. With these, only what differs between the runs.

    Returns:
        `rows`: each `name`, `default`, and `values` of the run and of the others, as texts, and
        `against`: whether they are compared with each other.
    """
    runs = [dict(flatten_settings(one)) for one in (settings, *others)]
    usual = defaults()
    rows = []
    for name in dict.fromkeys(name for run in (*runs, usual) for name in run):
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
    """Load the default value of every setting, by dotted name."""
    return dict(flatten_settings(config_to_dict(compose_config()[0])))


def _text(value: Any) -> str:
    if value is _ABSENT:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} …"
