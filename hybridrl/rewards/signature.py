"""How a reward function is called: for each row, or once for a rank's whole batch, as TRL does."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hybridrl.errors import ConfigError, nearest

OF_A_ROW = ("prompt", "response", "answer")
VERL = ("data_source", "solution_str", "ground_truth")
"""First parameters of a function of verl's shape."""
_CALLED = {"solution_str": "response", "ground_truth": "answer"}
"""What verl calls them, and what they are called here."""
_MEANT = {
    "completion": "response",
    "output": "response",
    "generation": "response",
    "solution": "answer",
    "label": "answer",
    "target": "answer",
    "reference": "answer",
    "question": "prompt",
    "instruction": "prompt",
    "query": "prompt",
} | _CALLED
"""Names of other libraries and what they mean."""
_CURE = (
    "Write it as `def score(prompt, response, answer, **row)`, or in TRL's shape as "
    "`def score(prompts, completions, **columns)`."
)


def takes_batch(parameters: Sequence[inspect.Parameter]) -> bool:
    """Whether a function is of TRL's shape: its first parameters are `completions`, or `prompts`
    and `completions`."""
    names = [parameter.name for parameter in parameters]
    return names[:1] == ["completions"] or names[:2] == ["prompts", "completions"]


def is_verls(parameters: Sequence[inspect.Parameter]) -> bool:
    """Whether a function is of verl's shape, `score(data_source, solution_str, ground_truth, ...)`,
    which is called for each row with the response and the answer under those names."""
    return tuple(parameter.name for parameter in parameters[:3]) == VERL


def as_verls(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row, with the names that a function of verl's shape knows besides."""
    return {**row, **{theirs: row[ours] for theirs, ours in _CALLED.items() if ours in row}}


def check_signature(name: str, parameters: Sequence[inspect.Parameter]) -> None:
    """Refuses a function that cannot be called, or that would see nothing of a response.

    Raises:
        ConfigError: names the function and its parameters.
    """
    shown = inspect.Signature(list(parameters))
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ConfigError(
                f"The reward function `{name}{shown}` takes `{parameter.name}` by position "
                f"only, and it is called with keyword arguments. {_CURE}"
            )
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    sees = "response" in [parameter.name for parameter in parameters]
    if not (takes_all or sees or takes_batch(parameters) or is_verls(parameters)):
        raise ConfigError(
            f"The reward function `{name}{shown}` has no parameter for the response"
            f"{_meant(parameters, ('response',))}. {_CURE}"
        )


def check_columns(
    name: str,
    parameters: Sequence[inspect.Parameter],
    columns: Collection[str],
    options: Collection[str] = (),
) -> None:
    """Refuses a function that needs what rows of the data do not have.

    Args:
        columns: Names of the row's entries, but for the response.
        options: Names that it is given besides.

    Raises:
        ConfigError: names the parameter and everything that there is.
    """
    batch = takes_batch(parameters)
    given = ["prompts", "completions"] if batch else ["prompt", "response"]
    given += [column for column in columns if column != "prompt"]
    known = {*given, *options, *(as_verls(dict.fromkeys(given)) if is_verls(parameters) else ())}
    for parameter in parameters:
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and parameter.default is parameter.empty and parameter.name not in known:
            meant = _meant([parameter], given)
            hint = "" if meant else nearest(parameter.name, given)
            cure = (
                "Rename the parameter."
                if meant
                else "Rename the parameter, give it a default, or set it for all rows: "
                f"reward.options.{name}.{parameter.name}=<value>."
            )
            raise ConfigError(
                f"The reward function `{name}{inspect.Signature(list(parameters))}` needs "
                f"`{parameter.name}`{meant}, and a row has {', '.join([*given, *options])}.{hint} "
                f"{cure}"
            )


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The keyword arguments of a function of TRL's shape: `prompts`, `completions`, and every
    further column of the rows, a list each."""
    renamed = {"prompt": "prompts", "response": "completions"}
    names = dict.fromkeys(name for row in rows for name in row)
    return {renamed.get(name, name): [row.get(name) for row in rows] for name in names}


def _meant(parameters: Sequence[inspect.Parameter], there: Collection[str]) -> str:
    """What the first of the parameters that other libraries have is called here."""
    for parameter in parameters:
        if (ours := _MEANT.get(parameter.name)) in there:
            return f" (`{parameter.name}` is called `{ours}` here)"
    return ""
