"""Checks that reward functions can score the rows of the data, before a worker starts.

That is for programs that add no columns of their own before they ask for rewards: the built-in
ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridrl.batch.batch import SOURCE_COLUMN, is_user_column
from hybridrl.config.schema import Config, DataConfig, RewardConfig, is_served
from hybridrl.config.setting import Setting
from hybridrl.data.mixture import find_source_rewards, list_source_names, parse_sources
from hybridrl.errors import ConfigError, DataError, ErrorCollector, RewardError
from hybridrl.evaluation.eval_sets import needs_held_out_rows, resolve_eval_sets
from hybridrl.rewards.loading import (
    check_functions_fit_columns,
    is_builtin_function,
    load_reward_function,
    make_short_names,
    resolve_functions,
)
from hybridrl.rewards.options import REWARD, FunctionSettings, resolve_options
from hybridrl.rewards.reward_pool import RewardPool
from hybridrl.rewards.source_pools import SourceSettings, resolve_source_settings
from hybridrl.trainers import load_roles, load_trainer

if TYPE_CHECKING:
    from hybridrl.batch.batch import Batch

_STRICT_COMPARERS = ("contains", "numeric", "boxed")
"""Built-in functions that refuse answers, and take a moment for a hundred thousand."""
_COMPARERS = ("exact", "math", *_STRICT_COMPARERS)
"""Built-in functions that compare responses with answers."""
OF_SHAPE = ("format", "length", "target_length")
"""Built-in functions that do not look at the answer."""
WITHOUT_PROCESS = {"exact", *_STRICT_COMPARERS, *OF_SHAPE}
"""Built-in functions that are quick to try in this process."""
_TRIAL_TIMEOUT_S = 10.0
"""Of a trial: a function that takes longer is not waited for."""
_IMPORT_TIMEOUT_S = 20.0
"""Of the user's file; `reward.timeout_s` if that is longer."""


def resolve_scored_sources(config: Config, kind: str) -> SourceSettings:
    """Return the settings of a job's rewards or costs by source; under None those of all other
    rows.

    Args:
        kind: `reward`, or `cost`, of which sources have none of their own.
    """
    own = find_source_rewards(config.data) if kind == "reward" else {}
    names = list_source_names(config.data)
    return resolve_source_settings(getattr(config, kind), own, names, Setting(kind))


def check_reward_data(config: Config, prompts: Batch, held_out: Batch | None = None) -> list[str]:
    """Check the parameters of reward functions against the columns of the data, and the user's in a
    reward process (`check_reward` of their modules). Try them on the first row that has an answer,
    with that as the response; built-in ones on every answer. A failure is an error where it would
    end the job (`reward.on_error=fail`).

    Returns:
        What the functions' modules have to say to the user, and what each function gave the right
        answer.

    Args:
        prompts: Tokenized; nothing is said of rows of another kind.
        held_out: Further ones, whose answers are looked at, too.

    Raises:
        ConfigError: names the function, the parameter and everything that a row has; or the
            function that compares with answers where there are none.
        DataError: names the row whose answer nothing can be compared with.
        RewardError: quotes the row, and says what the function did.
        UnsupportedMachineError: if a function cannot work on this machine.
    """
    trains = load_trainer(config.trainer.name).TRAINS
    if "prompt" not in prompts.columns or not (trains or needs_held_out_rows(config, trains)):
        return []
    kinds = {spec.worker for spec in load_roles(config).values()}
    plays = config.rollout.episode or is_served(config.rollout, config.environment)
    remarks: list[str] = []
    for kind in ("cost", "reward"):
        if kind in kinds and getattr(config, kind) is not None:
            by_source = resolve_scored_sources(config, kind)
            own = by_source.keys() - {None}
            for name, one in by_source.items():
                named = FunctionSettings.of(Setting(kind), name)
                _check_reference_answers_exist(_find_source_settings(config, name, own), one, named)
                mine, kept = (_select_source_rows(rows, name, own) for rows in (prompts, held_out))
                assert mine is not None
                reports = kind == "reward"
                remarks += check_reward_rows(one, mine, named, tries=not plays, reports=reports)
                if kept is not None:
                    _check_reference_answers(one, kept, named)
    return list(dict.fromkeys(remarks))


def check_eval_set_rewards(config: Config, sets: Mapping[str, Batch | None]) -> list[str]:
    """Check that the responses to each set's prompts can be scored; see `check_reward_data`.

    Returns:
        What the functions' modules have to say to the user.

    Raises:
        HybridRLError: names the set.
    """
    remarks: list[str] = []
    problems = ErrorCollector()
    for name, one in resolve_eval_sets(config).items():
        rows = sets.get(name)
        if rows is None or (one.own.function is not None and not one.is_verified):
            continue
        with problems.noted():
            try:
                plays = config.rollout.episode or is_served(config.rollout, config.environment)
                tries, named = one.is_verified and not plays, REWARD
                if one.is_verified:
                    named = FunctionSettings.of(one.setting / "reward")
                remarks += check_reward_rows(one.reward, rows, named, tries=tries)
            except (ConfigError, DataError, RewardError) as error:
                if one.is_verified:  # then it names the set's settings already
                    raise
                raise type(error)(f"{one.setting}: {error}") from error
    problems.raise_if_any()
    return remarks


def _select_source_rows(
    rows: Batch | None, name: str | None, own: Collection[str | None]
) -> Batch | None:
    """Select the rows of a source that has its own reward functions, or all other rows."""
    if rows is None or not own or SOURCE_COLUMN not in rows.columns:
        return rows
    chosen = [source == name if name else source not in own for source in rows[SOURCE_COLUMN]]
    return rows.take(np.flatnonzero(chosen))


def _find_source_settings(
    config: Config, name: str | None, own: Collection[str | None]
) -> list[DataConfig]:
    """Return the data settings that a source's reward functions, or `reward.function`, apply to."""
    found = parse_sources(config.data)
    return [s.data for s in found if (s.name == name if name else s.name not in own)] or [
        config.data
    ]


def check_reward_rows(
    settings: RewardConfig,
    prompts: Batch,
    named: FunctionSettings = REWARD,
    *,
    tries: bool,
    reports: bool = False,
) -> list[str]:
    """Check the functions of one reward group against prompts; return their remarks.

    Args:
        named: The names of the settings.
        tries: Call the functions on a row.
        reports: Say what they gave its right answer.
    """
    functions, weights = resolve_functions(settings)
    names = make_short_names(functions)
    check_functions_fit_columns(
        functions, settings.options, filter(is_user_column, prompts.columns), named
    )
    answers = prompts["answer"] if "answer" in prompts.columns else []
    first = next((number for number, answer in enumerate(answers) if answer), 0)
    row = prompts.slice(first, first + 1).rows_for_users()[0] if len(prompts) else None
    _try_builtin_options(functions, settings, row or {}, named)
    _check_reference_answers(settings, prompts, named)
    answer = "" if row is None else row.get("answer") or ""
    reports = reports and tries and bool(answer)
    if row is not None:
        row["response"] = f"\\boxed{{{answer}}}" if answer and "boxed" in functions else answer
    if row is None or not (reports or (tries and settings.on_error == "fail")):
        row = None
    scores: Sequence[float] = []
    remarks: list[str] = []
    if not all(map(is_builtin_function, functions)) or (
        reports and not WITHOUT_PROCESS.issuperset(functions)
    ):
        remarks, scores = _try_functions(functions, settings, row, named)
    elif reports and row is not None:
        scores = [
            _score(name, row | given)
            for name, given in zip(functions, resolve_options(names, settings.options), strict=True)
        ]
    if row is None or not (reports and scores):
        return remarks
    return [*remarks, _on_right_answer(row, dict(zip(names, scores, strict=True)), weights)]


def _score(function: Any, row: Mapping[str, Any]) -> float:
    """Score a row with a built-in function, in this process; return NaN if it fails."""
    try:
        return float(load_reward_function(function)(**row))
    except (TypeError, ValueError):
        return math.nan


def _on_right_answer(
    row: Mapping[str, Any], scores: Mapping[str, float], weights: Sequence[float]
) -> str:
    """Say what functions gave the right answer of a row, and which of them are suspect."""
    source = f" of source {row[SOURCE_COLUMN]}" if SOURCE_COLUMN in row else ""
    given = (f"{name} {'nothing' if math.isnan(s) else f'{s:g}'}" for name, s in scores.items())
    said = f"The reference answer{source} {row['answer'][:40]!r} scores: {', '.join(given)}."
    low = [
        f"`{name}`"
        for (name, score), weight in zip(scores.items(), weights, strict=True)
        if score <= 0 < weight and name not in OF_SHAPE
    ]
    if low:
        said += (
            f" So the right answer gets no reward from {' and '.join(low)}: a function that fails "
            "in silence does so, and one that wants more of a response than the answer alone, such "
            "as a box or tags. Try it on a whole response that is right."
        )
    return said


def _check_reference_answers_exist(
    sources: Sequence[DataConfig], settings: RewardConfig, named: FunctionSettings
) -> None:
    """Refuse functions that compare with reference answers where the data has none: an empty
    response would be correct."""
    names = [name for name in resolve_functions(settings)[0] if name in _COMPARERS]
    without = any(data.task is None and data.answer_column is None for data in sources)
    if names and without:
        raise ConfigError(
            f"{named.function}={names[0]} compares responses with answers, and "
            "data.answer_column=null says that there are none. Name their column, or another "
            "function."
        )


def _try_builtin_options(
    functions: Sequence[Any],
    settings: RewardConfig,
    row: Mapping[str, Any],
    named: FunctionSettings,
) -> None:
    """Call built-in functions once to check the types of their options.

    Args:
        row: One of the data.
    """
    trial = {**row, "prompt": "1", "response": "1", "answer": "1"}
    names = make_short_names(functions)
    for name, given in zip(functions, resolve_options(names, settings.options), strict=True):
        if not is_builtin_function(name) or not given:
            continue
        try:
            beside = {given["column"]: 1} if "column" in given else {"target": 1}
            load_reward_function(name)(**trial | beside | given)
        except (TypeError, ValueError) as error:
            shown = ", ".join(
                f"{named.group / 'options' / name / key}={value}" for key, value in given.items()
            )
            raise ConfigError(f"{shown}: `{name}` cannot work with that: {error}.") from error


def _check_reference_answers(
    settings: RewardConfig, prompts: Batch, named: FunctionSettings
) -> None:
    """Refuse reference answers that a function cannot compare, if that would end the job."""
    compared = [name for name in resolve_functions(settings)[0] if name in _STRICT_COMPARERS]
    for name in compared if settings.on_error == "fail" else ():
        check = partial(load_reward_function(name), prompt="", response="")
        pairs = (zip(rows["answer"], rows["prompt"], strict=True) for rows in prompts.pieces)
        for answer, prompt in itertools.chain.from_iterable(pairs):
            try:
                check(answer=answer)
            except ValueError as error:
                raise DataError(
                    f"{named.function}={name} cannot score the prompt that begins with "
                    f"{prompt[:60]!r}: {error} Mend the answer or leave the row out; or take "
                    f"another function, or {named.group}.on_error=drop."
                ) from error


def _try_functions(
    functions: Sequence[Any],
    settings: RewardConfig,
    row: dict[str, Any] | None,
    named: FunctionSettings,
) -> tuple[list[str], list[float]]:
    """Start the functions; return the remarks of their modules, and their scores of the row."""
    with RewardPool(
        functions,
        options=settings.options,
        timeout_s=settings.timeout_s,
        on_error="drop",
        env=settings.env,
        settings=named,
    ) as pool:
        pool.start(_IMPORT_TIMEOUT_S)
        if row is None:
            return pool.remarks, []
        found = pool.score([row], within_s=_TRIAL_TIMEOUT_S)
    is_slow = found.timeouts and settings.timeout_s > _TRIAL_TIMEOUT_S
    if found.first_failure and not is_slow and settings.on_error == "fail":
        raise RewardError(
            "Tried before the start, on the first row of the data with its answer as the response: "
            f"{found.first_failure.rstrip()}\nMend the function; or set `{named.group}.on_error` "
            "to `drop` or `value`, to go on in spite of such rows."
        )
    names = make_short_names(functions)
    return pool.remarks, [found.columns[f"reward/{name}"][0] for name in names]
