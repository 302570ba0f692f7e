"""Options of reward functions: `reward.options.<function>.<option>`, a keyword argument each."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.errors import ConfigError, nearest

_OF_THE_ROW = ("prompt", "response", "answer", "prompts", "completions")


def options_of(
    names: Sequence[str], options: Mapping[str, Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The options of each function, in the order of `names` (see `short_names`).

    Raises:
        ConfigError: if there are options for a name that is not there, or that are no mapping.
    """
    options = options or {}
    for name, given in options.items():
        if name not in names:
            raise ConfigError(
                f"`reward.options.{name}` is set, but `reward.function` names no `{name}`; it has "
                f"{', '.join(names)}." + nearest(name, names)
            )
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"`reward.options.{name}` is {given!r}, expected a keyword argument of the "
                f"function: reward.options.{name}.<option>=<value>."
            )
    return [dict(options.get(name, {})) for name in names]


def check_options(
    name: str,
    parameters: Sequence[inspect.Parameter],
    options: Mapping[str, Any],
    *,
    complete: bool = False,
) -> None:
    """Refuses options that a function has no parameter for.

    A `**row` takes none: it would swallow a misspelt one without a word.

    Args:
        complete: Also refuses that a keyword-only parameter without a default gets no option. In
            a built-in function, these are options; in a user's, they may be columns of the data.

    Raises:
        ConfigError: names the option and the nearest one.
    """
    parameters = [p for p in parameters if p.name not in _OF_THE_ROW]
    taken = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for option in options:
        if option not in taken:
            raise ConfigError(
                f"`reward.options.{name}.{option}` is set, but the function `{name}` has no "
                f"parameter `{option}` for it; it has {', '.join(taken) or 'none'}."
                + nearest(option, taken)
            )
    needed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    missing = [option for option in needed if option not in options]
    if complete and missing:
        raise ConfigError(
            f"The reward function `{name}` needs to be told its `{missing[0]}`: set "
            f"reward.options.{name}.{missing[0]}=<value>."
        )


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """The parameters; of a function written in C, which tells none, a catch-all."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return [inspect.Parameter("row", inspect.Parameter.VAR_KEYWORD)]
