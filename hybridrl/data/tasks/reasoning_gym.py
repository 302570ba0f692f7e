"""The tasks of reasoning-gym: procedurally generated problems with a verifier each.

Stojanovski et al. 2025, arXiv:2505.24760. Questions are English sentences, so a tiny model knows
printable ASCII; what else a task writes (emoji, box drawing) is unknown to it.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS
from hybridrl.data.held_out import MAX_HELD_OUT_SHARE
from hybridrl.data.row_origin import DATA, RowOrigin
from hybridrl.data.samplers.difficulty_columns import DIFFICULTY_PREFIX
from hybridrl.errors import ConfigError, suggest_name
from hybridrl.system.reasoning_gym_library import (
    build_reasoning_gym_dataset,
    check_reasoning_gym_installed,
)

CHARACTERS = PRINTABLE_CHARACTERS
_OVERSAMPLING = 4
"""Problems that are made for each one that is wanted, for some repeat others."""
_EXCLUDED_TASKS = ("composite",)

_log = logging.getLogger(__name__)
TaskRow = dict[str, Any]


def problems(
    count_held_out: int = 256,
    seed: int = 0,
    *,
    tasks: Sequence[str] = (),
    task_options: Mapping[str, Any] | None = None,
    rows: int = 2000,
    origin: RowOrigin = DATA,
) -> tuple[list[TaskRow], list[TaskRow]]:
    """Return problems to learn from and to evaluate on, without repeated questions and about as
    many of each task.

    A row has the columns `prompt`; `answer`, None where many are right; `entry`, the problem with
    its metadata and the task's parameters, as JSON, for the reward function `reasoning_gym`;
    `task`, and `source`, which is the same; and a column `difficulty_<parameter>` for each number
    that says how hard it is, NaN for problems of tasks without that parameter.

    Args:
        count_held_out: Most to evaluate on; of a task with few different problems a fifth.
        tasks: Names of reasoning-gym's tasks.
        task_options: Parameters, by task.
        rows: How many to learn from.

    Raises:
        MissingPackageError: if reasoning-gym is not installed.
        ConfigError: for a task or a parameter that there is not.
    """
    check_reasoning_gym_installed()
    options = _check_tasks(tasks, task_options or {}, origin)
    training: list[TaskRow] = []
    held_out: list[TaskRow] = []
    for number, task in enumerate(tasks):
        learned = _split_evenly(rows, number, len(tasks))
        kept = _split_evenly(count_held_out, number, len(tasks))
        wanted = learned + kept
        text = json.dumps(options.get(task, {}) | {"seed": seed, "size": _OVERSAMPLING * wanted})
        found = _make_distinct_rows(task, text, wanted)
        if len(found) < wanted:
            kept = min(kept, int(MAX_HELD_OUT_SHARE * len(found)))
            _log.warning(
                "%s has %d different problems with these parameters, fewer than the %d that %s and "
                "%s ask for.",
                task,
                len(found),
                wanted,
                *(origin / "rows", origin.held_out),
            )
        held_out += found[:kept]
        training += found[kept : kept + learned]
    names = sorted({name for row in (*training, *held_out) for name in row})
    blank: TaskRow = {
        name: math.nan if name.startswith(DIFFICULTY_PREFIX) else None for name in names
    }
    return [blank | row for row in training], [blank | row for row in held_out]


def _split_evenly(number: int, place: int, parts: int) -> int:
    """Return the size of one of `parts` parts of a number, which differ by at most one."""
    return number // parts + (place < number % parts)


@lru_cache(maxsize=64)  # rows to sample from and rows to warm up with are the same
def _make_distinct_rows(task: str, options: str, number: int) -> list[TaskRow]:
    """Generate `number` rows with distinct questions, or as many as there are."""
    made = build_reasoning_gym_dataset(task, options)
    given = {k: v for k, v in json.loads(options).items() if k not in ("seed", "size")}
    found: dict[str, TaskRow] = {}
    for place in range(_OVERSAMPLING * number):
        if len(found) == number:
            break
        entry = made[place]
        found.setdefault(entry["question"], _make_row(task, given, entry))
    return list(found.values())


def _make_row(task: str, options: Mapping[str, Any], entry: Mapping[str, Any]) -> TaskRow:
    metadata = entry["metadata"]
    kept = {name: entry[name] for name in ("question", "answer", "metadata")}
    return {
        "prompt": entry["question"],
        "answer": entry["answer"],
        "entry": json.dumps({"task": task, "options": options, **kept}, default=str),
        "task": task,
        "source": task,
        **_read_difficulty(metadata),
    }


def _read_difficulty(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric difficulty parameters of a problem; ranges count only if the metadata has
    the value drawn from them."""
    said = metadata.get("difficulty")
    said = said if isinstance(said, Mapping) else {"level": said}
    found = {name: metadata.get(name, value) for name, value in said.items()}
    return {
        f"{DIFFICULTY_PREFIX}{name}": float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _check_tasks(
    tasks: Sequence[str], options: Mapping[str, Any], origin: RowOrigin
) -> dict[str, dict[str, Any]]:
    """Check tasks and parameters, and return the parameters of each task."""
    from reasoning_gym.factory import DATASETS

    known, named = sorted(set(DATASETS) - set(_EXCLUDED_TASKS)), origin / "tasks"
    if not tasks:
        raise ConfigError(
            f"{named} is empty: name tasks of reasoning-gym, as in {named}=[chain_sum, gcd]. There "
            f"are {', '.join(known)}."
        )
    for task in tasks:
        if task not in known:
            raise ConfigError(
                f"{named} names `{task}`, which is no task of reasoning-gym ({len(known)} are "
                f"there).{suggest_name(task, known)}"
            )
    if len(set(tasks)) < len(tasks):
        raise ConfigError(f"{named}={list(tasks)} names a task twice. Leave one out.")
    for task, given in options.items():
        setting = origin / "task_options" / task
        if task not in tasks:
            raise ConfigError(
                f"{setting} is set, but {named} has {', '.join(tasks)}.{suggest_name(task, tasks)}"
            )
        if not isinstance(given, Mapping):
            raise ConfigError(f"{setting}={given}: must be parameters, {setting}.<name>=<value>.")
        _check_parameters(task, setting, given, DATASETS[task][1])
    return {task: dict(given) for task, given in options.items()}


def _check_parameters(task: str, setting: str, given: Mapping[str, Any], config: Any) -> None:
    names = [name for name in inspect.signature(config).parameters if name not in ("seed", "size")]
    for name in given:
        if name not in names:
            raise ConfigError(
                f"{setting}.{name}: `{task}` has no such parameter; it has {', '.join(names)}."
                + suggest_name(str(name), names)
            )
    try:
        made = config(**given)
        if hasattr(made, "validate"):
            made.validate()
    except Exception as error:  # theirs are assertions, as a rule
        raise ConfigError(
            f"{setting}={dict(given)}: reasoning-gym refuses that: {error or type(error).__name__}."
        ) from error
