"""Rubrics: criteria that a judge grades one by one, from a file or from a column of the data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hybridrl.config.setting import Setting
from hybridrl.errors import ConfigError, DataError


class RubricCriterion(NamedTuple):
    """A property that a response should have, and its weight; a negative weight: should not
    have."""

    text: str
    weight: float


def load_rubric(
    path: str, setting: Setting = Setting("reward.judge.rubric")
) -> list[RubricCriterion]:
    """Read the criteria of a file.

    Raises:
        ConfigError: if it cannot be read, or holds none.
    """
    try:
        given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        return parse_rubric(given)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"{setting}={path} could not be read: {error}. It is a list of criteria in "
            "JSON or YAML, each a text, or {criterion: text, weight: number}."
        ) from error


def read_row_rubric(
    row: Mapping[str, Any], column: str, setting: Setting = Setting("reward.judge.rubric_column")
) -> list[RubricCriterion]:
    """Return the criteria of a row, given as a list or as JSON.

    Raises:
        DataError: if there are none.
    """
    given = row.get(column)
    try:
        return parse_rubric(json.loads(given) if isinstance(given, str) else given)
    except ValueError as error:
        raise DataError(
            f"{setting}={column}: the row whose prompt begins with "
            f"{str(row.get('prompt', ''))[:60]!r} has no rubric there: {error}."
        ) from error


def parse_rubric(given: Any) -> list[RubricCriterion]:
    """Parse criteria: texts, or objects with `criterion` and `weight` (or `points`, as HealthBench
    calls it).

    Raises:
        ValueError: if it is no such list, or nothing in it counts for an answer.
    """
    if not isinstance(given, list) or not given:
        raise ValueError("it must be a list with a criterion or more")
    found = []
    for one in given:
        entry = {"criterion": one} if isinstance(one, str) else one
        if not isinstance(entry, Mapping) or not str(entry.get("criterion") or "").strip():
            raise ValueError(f"{str(one)[:80]!r} is no criterion")
        weight = next((entry[k] for k in ("weight", "points") if entry.get(k) is not None), 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ValueError(f"the weight {weight!r} is no number")
        if not math.isfinite(weight):
            raise ValueError(f"the weight {weight!r} is not finite")
        found.append(RubricCriterion(str(entry["criterion"]), float(weight)))
    if not any(criterion.weight > 0 for criterion in found):
        raise ValueError("no criterion has a weight above 0, so that no response could be good")
    return found


def rubric_score(rubric: Sequence[RubricCriterion], grades: Sequence[float]) -> float:
    """Return the weighted share of the desired criteria that a response meets, from 0 to 1, less
    what undesired ones cost. NaN if a criterion has no grade (NaN).

    Arora et al. 2025 (HealthBench), arXiv:2505.08775, section 3.
    """
    earned = sum(c.weight * grade for c, grade in zip(rubric, grades, strict=True))
    share = earned / sum(max(0.0, criterion.weight) for criterion in rubric)
    return share if math.isnan(share) else min(max(share, 0.0), 1.0)
