"""Options of reward functions: `reward.options.<function>.<option>` is a keyword argument."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hybridrl.config.setting import Setting
from hybridrl.errors import ConfigError, suggest_name


class FunctionSettings(NamedTuple):
    """The names of the settings that reward functions come from.

    Attributes:
        group: Of their options, weights and limits: `reward`, `cost`, `eval.sets.math.reward`.
        function: Of the functions themselves: `reward.function`, `data.sources.gsm8k.reward`.
    """

    group: Setting = Setting("reward")
    function: Setting = Setting("reward.function")

    @classmethod
    def of(cls, group: Setting, source: str | None = None) -> FunctionSettings:
        """Return the settings of a group, or of the functions that a source of data has for
        itself."""
        own = group / "function" if source is None else Setting(f"data.sources.{source}.reward")
        return cls(group, own)

    def of_each(self, functions: int, watched: int) -> list[Setting]:
        """Return the setting that each function comes from: the last `watched` are those of
        `check`."""
        return [self.function] * (functions - watched) + [self.group / "check"] * watched


REWARD = FunctionSettings()
_ROW_PARAMETERS = ("prompt", "response", "answer", "prompts", "completions")


def resolve_options(
    names: Sequence[str],
    options: Mapping[str, Mapping[str, Any]] | None,
    settings: FunctionSettings = REWARD,
) -> list[dict[str, Any]]:
    """Return the options of each function, in the order of `names` (see `make_short_names`).

    Raises:
        ConfigError: if there are options for a name that is not there, or that are no mapping.
    """
    options = options or {}
    for name, given in options.items():
        setting = settings.group / "options" / name
        if name not in names:
            raise ConfigError(
                f"`{setting}` is set, but `{settings.function}` names no `{name}`; it has "
                f"{', '.join(names)}." + suggest_name(name, names)
            )
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"`{setting}` is {given!r}, expected a keyword argument of the function: "
                f"{setting}.<option>=<value>."
            )
    return [dict(options.get(name, {})) for name in names]


def check_function_options(
    name: str,
    parameters: Sequence[inspect.Parameter],
    options: Mapping[str, Any],
    settings: FunctionSettings = REWARD,
    *,
    complete: bool = False,
) -> None:
    """Refuse options that the function has no parameter for.

    A `**row` takes none: it would swallow a misspelt one without a word.

    Args:
        complete: Also refuses that a keyword-only parameter without a default gets no option. In
            a built-in function, these are options; in a user's, they may be columns of the data.

    Raises:
        ConfigError: names the option and the nearest one.
    """
    setting = settings.group / "options" / name
    parameters = [p for p in parameters if p.name not in _ROW_PARAMETERS]
    taken = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for option in options:
        if option not in taken:
            raise ConfigError(
                f"`{setting / option}` is set, but the function `{name}` has no parameter "
                f"`{option}` for it; it has {', '.join(taken) or 'none'}."
                + suggest_name(option, taken)
            )
    needed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    missing = [option for option in needed if option not in options]
    if complete and missing:
        raise ConfigError(
            f"The reward function `{name}` needs to be told its `{missing[0]}`: set "
            f"{setting / missing[0]}=<value>."
        )


def read_parameters(function: Any) -> list[inspect.Parameter]:
    """Return the parameters of a function; a catch-all `**row` for functions in C that do not tell
    theirs."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return [inspect.Parameter("row", inspect.Parameter.VAR_KEYWORD)]
