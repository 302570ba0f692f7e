"""How a reward function is called: for each row, or once for a rank's whole batch, as TRL does."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.errors import ConfigError

_OF_A_ROW = {"prompt", "response", "answer"}


def takes_batch(parameters: Sequence[inspect.Parameter]) -> bool:
    """Whether a function is of TRL's shape: its first parameters are `completions`, or `prompts`
    and `completions`."""
    names = [parameter.name for parameter in parameters]
    return names[:1] == ["completions"] or names[:2] == ["prompts", "completions"]


def check_signature(name: str, parameters: Sequence[inspect.Parameter]) -> None:
    """Refuses a function that cannot be called, or that would see nothing of a response.

    Raises:
        ConfigError: names the function and its parameters.
    """
    shown = inspect.Signature(list(parameters))
    cure = (
        "Write it as `def score(prompt, response, answer, **row)`, or in TRL's shape as "
        "`def score(prompts, completions, **columns)`."
    )
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ConfigError(
                f"The reward function `{name}{shown}` takes `{parameter.name}` by position "
                f"only, and it is called with keyword arguments. {cure}"
            )
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    known = {parameter.name for parameter in parameters} & _OF_A_ROW
    if not (takes_all or known or takes_batch(parameters)):
        raise ConfigError(
            f"The reward function `{name}{shown}` has no parameter for the response. {cure}"
        )


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The keyword arguments of a function of TRL's shape: `prompts`, `completions`, and every
    further column of the rows, a list each."""
    renamed = {"prompt": "prompts", "response": "completions"}
    names = dict.fromkeys(name for row in rows for name in row)
    return {renamed.get(name, name): [row.get(name) for row in rows] for name in names}
