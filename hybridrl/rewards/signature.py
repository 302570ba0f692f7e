"""The call signature of a reward function: per row, per prompt with all its samples, or per batch
of a rank, as TRL does."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

from hybridrl.errors import ConfigError, suggest_name
from hybridrl.rewards.options import REWARD, FunctionSettings

MESSAGES = "prompt_messages"
"""A column of the data: the prompts of chats as messages, before the chat template."""
TOKEN_IDS_ENTRY, UPDATES_ENTRY = "response_token_ids", "updates"
"""Entries of a row that only a function gets that names them, one of TRL's shape under its names:
the tokens of the response, and how many updates the policy had had."""
_PRIVATE = (MESSAGES, TOKEN_IDS_ENTRY, UPDATES_ENTRY)
_OF_TOKENS = {"completion_ids", "completions_ids"}
_LOGGERS = {"log_metric", "log_extra"}
_OF_TRL = ("completion_ids", "completions_ids", "trainer_state", "log_metric", "log_extra")
VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth")
"""First parameters of a function of verl's shape."""
_SCOPE_ENTRIES = {
    "row": ("prompt", "response"),
    "group": ("prompt", "responses"),
    "rows": ("prompts", "completions"),
}
_VERL_NAMES = {"solution_str": "response", "ground_truth": "answer"}
"""What verl calls them, and what they are called here."""
_FOREIGN_NAMES = {
    **dict.fromkeys(("completion", "output", "generation"), "response"),
    **dict.fromkeys(("solution", "label", "target", "reference"), "answer"),
    **dict.fromkeys(("question", "instruction", "query"), "prompt"),
    **_VERL_NAMES,
}
"""Names of other libraries and what they mean."""
_SIGNATURE_HINT = (
    "Write it as `def score(prompt, response, answer, **row)`, or in TRL's shape as `def "
    "score(prompts, completions, **columns)`."
)


def find_call_scope(parameters: Sequence[inspect.Parameter]) -> Literal["row", "group", "rows"]:
    """Return the scope of a call: `rows` (all of a rank) if it takes `completions` or their tokens
    as TRL's do, `group` (samples of a prompt) if it takes `responses`, else `row`."""
    names = {parameter.name for parameter in parameters}
    if names & {"completions", *_OF_TOKENS}:
        return "rows"
    return "group" if "responses" in names else "row"


def has_verl_signature(parameters: Sequence[inspect.Parameter]) -> bool:
    """Return whether a function has verl's signature, `score(data_source, solution_str,
    ground_truth, ...)`; it is called per row with these names."""
    return tuple(parameter.name for parameter in parameters[:3]) == VERL_PARAMETERS


def list_needed_entries(parameters: Sequence[inspect.Parameter]) -> set[str]:
    """Return the optional entries of rows that a function's parameters name."""
    names = {parameter.name for parameter in parameters}
    needed = names & {TOKEN_IDS_ENTRY, UPDATES_ENTRY}
    if names & _OF_TOKENS:
        needed.add(TOKEN_IDS_ENTRY)
    if "trainer_state" in names:
        needed.add(UPDATES_ENTRY)
    return needed


def select_arguments(
    parameters: Sequence[inspect.Parameter], row: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the entries that a function takes from a row (or from merged rows): those it names, or
    all if it has a `**row`."""
    kind, names = find_call_scope(parameters), {parameter.name for parameter in parameters}
    given = dict(row)
    if kind == "rows":
        given |= _add_trl_names(given, names)
    elif has_verl_signature(parameters):
        given = add_verl_names(given)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        hidden = {*_PRIVATE, *(["responses"] if kind == "rows" else [])} - names
        return {name: value for name, value in given.items() if name not in hidden}
    return {name: value for name, value in given.items() if name in names}


def merge_all_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the rows into one call of TRL's signature, with a list for each column."""
    names = dict.fromkeys(name for row in rows for name in row)
    renamed = {"prompt": "prompts", "response": "responses"}
    return {renamed.get(name, name): [row.get(name) for row in rows] for name in names}


def merge_group_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the samples of a prompt into one call: their `responses`, and the prompt's entries
    once."""
    first = {name: value for name, value in rows[0].items() if name != "response"}
    return {**first, "responses": [row["response"] for row in rows]}


def _add_trl_names(columns: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the entries under TRL's names: chats as message lists, token ids, `trainer_state` and
    loggers."""
    responses, chats = columns["responses"], columns.get(MESSAGES)
    found: dict[str, Any] = {"completions": responses}
    if chats is not None and any(chat is not None for chat in chats):
        found["prompts"] = chats
        found["completions"] = [[{"role": "assistant", "content": text}] for text in responses]
    for name in _OF_TOKENS & set(names):
        found[name] = columns.get(TOKEN_IDS_ENTRY, [[] for _ in responses])
    if "trainer_state" in names:
        updates = [number for number in columns.get(UPDATES_ENTRY, ()) if number is not None]
        found["trainer_state"] = SimpleNamespace(global_step=max(updates, default=0))
    for name in _LOGGERS & set(names):
        found[name] = _ignore_log
    return found


def _ignore_log(*arguments: Any, **keywords: Any) -> None:
    """Ignore what a function logs through TRL's `log_metric` and `log_extra`."""


def add_verl_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with verl's names added."""
    return {**row, **{theirs: row[ours] for theirs, ours in _VERL_NAMES.items() if ours in row}}


def check_call_signature(name: str, parameters: Sequence[inspect.Parameter]) -> None:
    """Refuse a function that cannot be called by keyword, or that takes nothing of a response.

    Raises:
        ConfigError: names the function and its parameters.
    """
    shown = inspect.Signature(list(parameters))
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ConfigError(
                f"The reward function `{name}{shown}` takes `{parameter.name}` by position only, "
                f"and it is called with keyword arguments. {_SIGNATURE_HINT}"
            )
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    sees = "response" in [parameter.name for parameter in parameters]
    if not (
        takes_all or sees or find_call_scope(parameters) != "row" or has_verl_signature(parameters)
    ):
        raise ConfigError(
            f"The reward function `{name}{shown}` has no parameter for the "
            f"response{_suggest_name(parameters, ('response',))}. {_SIGNATURE_HINT}"
        )


def check_parameters_in_columns(
    name: str,
    parameters: Sequence[inspect.Parameter],
    columns: Collection[str],
    options: Collection[str] = (),
    settings: FunctionSettings = REWARD,
) -> None:
    """Refuse a function that needs a column that the data lacks.

    Args:
        columns: Names of the row's entries, but for the response.
        options: Names that it is given besides.

    Raises:
        ConfigError: names the parameter and everything that there is.
    """
    given = list(_SCOPE_ENTRIES[find_call_scope(parameters)])
    given += [column for column in columns if column not in ("prompt", *_PRIVATE)]
    beside = _OF_TRL if find_call_scope(parameters) == "rows" else (TOKEN_IDS_ENTRY,)
    known = {
        *given,
        *beside,
        *options,
        *(add_verl_names(dict.fromkeys(given)) if has_verl_signature(parameters) else ()),
    }
    for parameter in parameters:
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and parameter.default is parameter.empty and parameter.name not in known:
            meant = _suggest_name([parameter], given)
            hint = "" if meant else suggest_name(parameter.name, given)
            cure = (
                "Rename the parameter."
                if meant
                else "Rename the parameter, give it a default, or set it for all rows: "
                f"{settings.group / 'options' / name / parameter.name}=<value>."
            )
            raise ConfigError(
                f"The reward function `{name}{inspect.Signature(list(parameters))}` needs "
                f"`{parameter.name}`{meant}, and a row has {', '.join([*given, *options])}.{hint} "
                f"{cure}"
            )


def _suggest_name(parameters: Sequence[inspect.Parameter], there: Collection[str]) -> str:
    """Return a hint with our name for the first parameter that is named as in another library."""
    for parameter in parameters:
        if (ours := _FOREIGN_NAMES.get(parameter.name)) in there:
            return f" (`{parameter.name}` is called `{ours}` here)"
    return ""
