"""Whether reward functions can score rows of this data, found before a worker starts.

That is for programs that add no columns of their own before they ask for rewards: the built-in
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridrl.config.schema import Config, DataConfig, RewardConfig, is_served
from hybridrl.core.batch import is_of_data
from hybridrl.data.mixture import COLUMN as SOURCE
from hybridrl.data.mixture import rewards_of, source_names, sources_of
from hybridrl.errors import ConfigError, DataError, RewardError
from hybridrl.rewards import RewardPool
from hybridrl.rewards.by_source import settings_by_source
from hybridrl.rewards.code import read_tests
from hybridrl.rewards.loading import (
    check_fit,
    functions_of,
    is_builtin,
    load_function,
    said_of,
    short_names,
)
from hybridrl.rewards.options import options_of
from hybridrl.trainers import load_roles

if TYPE_CHECKING:
    from hybridrl.core.batch import Batch

COMPARE = ("contains", "numeric", "boxed")
"""Built-in functions that refuse answers, and take a moment for a hundred thousand."""
TESTED = "hybridrl.rewards.code:passes_tests"
"""A function that refuses `tests`."""
TO_ANSWERS = ("exact", "math", *COMPARE)
"""Built-in functions that compare responses with answers."""
LONGEST_S = 10.0
"""Of a trial: a function that takes longer is not waited for."""
LONGEST_IMPORT_S = 20.0
"""Of the user's file; `reward.timeout_s` if that is longer."""


def check_rewards(config: Config, prompts: Batch, held_out: Batch | None = None) -> list[str]:
    """Holds the parameters of reward functions against the columns of the data, and has the user's
    checked in a reward process (`check_reward` of their modules). Where a failure would end the job
    (`reward.on_error=fail`), tries them: built-in ones on every answer, the user's on the first
    row, with its right answer as the response.

    Returns:
        What the functions' modules have to say to the user.

    Args:
        prompts: Tokenized; nothing is said of rows of another kind.
        held_out: Further ones, whose answers are looked at, too.

    Raises:
        ConfigError: names the function, the parameter and everything that a row has; or the
            function that compares with answers where there are none.
        DataError: names the row whose answer nothing can be compared with.
        RewardError: quotes the row, and says what the function did.
        MachineError: if a function cannot work on this machine.
    """
    if "prompt" not in prompts.columns:
        return []
    kinds = {spec.worker for spec in load_roles(config).values()}
    plays = config.rollout.episode or is_served(config.rollout, config.environment)
    remarks: list[str] = []
    for kind in sorted(kinds & {"reward", "cost"}):
        settings = getattr(config, kind)
        if settings is not None:
            own = rewards_of(config.data) if kind == "reward" else {}
            names = source_names(config.data)
            with said_of(kind):
                for name, one in settings_by_source(settings, own, names).items():
                    mine = [_of_source(rows, name, own) for rows in (prompts, held_out)]
                    _check_compares(_data_of(config, name, own), one)
                    remarks += _of_settings(one, *mine, tries=not plays)
    return list(dict.fromkeys(remarks))


def _of_source(rows: Batch | None, name: str | None, own: Collection[str]) -> Batch | None:
    """The rows of a source that has functions of its own, or of all that have none."""
    if rows is None or not own or SOURCE not in rows.columns:
        return rows
    chosen = [source == name if name else source not in own for source in rows[SOURCE]]
    return rows.take(np.flatnonzero(chosen))


def _data_of(config: Config, name: str | None, own: Collection[str]) -> list[DataConfig]:
    """Settings of the data that is scored by the functions of a source, or of `reward.function`."""
    found = sources_of(config.data)
    return [s.data for s in found if (s.name == name if name else s.name not in own)] or [
        config.data
    ]


def _of_settings(
    settings: RewardConfig, prompts: Batch | None, held_out: Batch | None, *, tries: bool
) -> list[str]:
    assert prompts is not None
    remarks = check_scoring(settings, prompts, tries=tries)
    if held_out is not None:
        _check_answers(settings, held_out)
    return remarks


def check_scoring(settings: RewardConfig, prompts: Batch, *, tries: bool) -> list[str]:
    """Remarks of the functions of these settings on these prompts; see `check_rewards`.

    Args:
        tries: Call the user's functions on a row.
    """
    functions, _ = functions_of(settings)
    check_fit(functions, settings.options, filter(is_of_data, prompts.columns))
    row = prompts.slice(0, 1).rows_for_users()[0] if len(prompts) else None
    _check_options(functions, settings, row or {})
    _check_answers(settings, prompts)
    if all(map(is_builtin, functions)):
        return []
    return _try(functions, settings, row if tries and settings.on_error == "fail" else None)


def _check_compares(sources: Sequence[DataConfig], settings: RewardConfig) -> None:
    """Refuses to compare with answers that there are none of: an empty response would be right."""
    names = [name for name in functions_of(settings)[0] if name in TO_ANSWERS]
    without = any(data.task is None and data.answer_column is None for data in sources)
    if names and without:
        raise ConfigError(
            f"reward.function={names[0]} compares responses with answers, and "
            "data.answer_column=null says that there are none. Name their column, or another "
            "function."
        )


def _check_options(
    functions: Sequence[Any], settings: RewardConfig, row: Mapping[str, Any]
) -> None:
    """Calls built-in functions once with their options, whose types nobody else knows.

    Args:
        row: One of the data.
    """
    trial = {**row, "prompt": "1", "response": "1", "answer": "1"}
    names = short_names(functions)
    for name, given in zip(functions, options_of(names, settings.options), strict=True):
        if not is_builtin(name) or not given:
            continue
        try:
            beside = {given["column"]: 1} if "column" in given else {"target": 1}
            load_function(name)(**trial | beside | given)
        except (TypeError, ValueError) as error:
            shown = ", ".join(
                f"reward.options.{name}.{key}={value}" for key, value in given.items()
            )
            raise ConfigError(f"{shown}: `{name}` cannot work with that: {error}.") from error


def _check_answers(settings: RewardConfig, prompts: Batch) -> None:
    """Refuses answers and tests that nothing can be compared with, where that would end the job."""
    for name in functions_of(settings)[0] if settings.on_error == "fail" else ():
        check: Callable[..., Any]
        if name in COMPARE:
            column, check = "answer", partial(load_function(name), prompt="", response="")
        elif name == TESTED and "tests" in prompts.columns:
            column, check = "tests", read_tests
        else:
            continue
        values = prompts.table.column(column).to_pylist()
        for given, prompt in zip(values, prompts["prompt"], strict=True):
            try:
                check(**{column: given})
            except ValueError as error:
                raise DataError(
                    f"reward.function={name} cannot score the prompt that begins with "
                    f"{prompt[:60]!r}: {error} Mend the {column} or leave the row out; or take "
                    "another function, or reward.on_error=drop."
                ) from error


def _try(functions: Sequence[Any], settings: RewardConfig, row: dict[str, Any] | None) -> list[str]:
    limits = {"timeout_s": settings.timeout_s, "on_error": "drop"}
    with RewardPool(functions, None, settings.options, **limits) as pool:
        pool.start(LONGEST_IMPORT_S)
        if row is None:
            return pool.remarks
        row["response"] = row.get("answer", "")
        found = pool.score([row], within_s=LONGEST_S)
    if found.first_failure and not (found.timeouts and settings.timeout_s > LONGEST_S):
        raise RewardError(
            "Tried before the start, on the first row of the data with its answer as the "
            f"response: {found.first_failure.rstrip()}\nMend the function; or set "
            "`reward.on_error` to `drop` or `value`, to go on in spite of such rows."
        )
    return pool.remarks
