"""Resolving reward functions: `path/to/file.py:score`, `package.module:score`, or built-in."""

from __future__ import annotations

import inspect
import math
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hybridrl.config.setting import Setting
from hybridrl.errors import ConfigError, RewardError, suggest_name
from hybridrl.rewards import builtin_rewards
from hybridrl.rewards.format_rewards import check_format_pattern
from hybridrl.rewards.math_reward import check_math_verify_installed
from hybridrl.rewards.options import (
    REWARD,
    FunctionSettings,
    check_function_options,
    read_parameters,
    resolve_options,
)
from hybridrl.rewards.signature import (
    check_call_signature,
    check_parameters_in_columns,
    find_call_scope,
)
from hybridrl.system import user_code
from hybridrl.system.reasoning_gym_library import check_reasoning_gym_installed

RewardFunction = Callable[..., Any]


class PickledFunction(NamedTuple):
    """A reward function that travels as a pickle, because a reward process cannot import it by
    name."""

    name: str
    pickle: bytes

    @classmethod
    def of(cls, function: RewardFunction) -> PickledFunction:
        """Pickle a function with everything it refers to.

        Raises:
            RewardError: if that cannot be pickled.
        """
        import cloudpickle

        name, inner = find_function_name(function), getattr(function, "func", function)
        module = sys.modules.get(getattr(inner, "__module__", None) or "__main__")
        # A file of the user's is no module to a reward process. (`__main__` always travels so.)
        by_value = module is not None and module.__name__ not in ("__main__", "builtins")
        try:
            if by_value:
                cloudpickle.register_pickle_by_value(module)
            return cls(name, cloudpickle.dumps(function))
        except Exception as error:  # whatever the objects that it refers to raise
            raise RewardError(
                f"The reward function `{name}` cannot be sent to the processes that run it: "
                f"{type(error).__name__}: {error}. Keep what it needs inside of it, or give it as "
                "`path/to/file.py:name`."
            ) from error
        finally:
            if by_value:
                cloudpickle.unregister_pickle_by_value(module)


def find_function_name(function: RewardFunction | PickledFunction) -> str:
    """Return the name of a function, or of the class of a callable object."""
    if isinstance(function, PickledFunction):
        return function.name
    inner = getattr(function, "func", function)  # of a functools.partial
    return str(getattr(inner, "__name__", type(inner).__name__)).strip("<>")


def list_builtin_functions() -> list[str]:
    return sorted(builtin_rewards.__all__)


def load_reward_function(
    spec: str | PickledFunction, setting: Setting = REWARD.function
) -> RewardFunction:
    """Import and return the reward function that `spec` names, or unpickle it.

    Raises:
        ConfigError: if the file, the module or the function does not exist, importing it raises,
            or the name stands for something not callable.
    """
    function: RewardFunction
    if isinstance(spec, PickledFunction):
        function = pickle.loads(spec.pickle)
        return function
    place, name = _parse_spec(spec, setting)
    if not place:
        function = getattr(builtin_rewards, name)
        return function
    function = user_code.load_user_code(setting, spec)
    if not callable(function):
        raise ConfigError(
            f"`{setting}` names `{spec}`, which is {function!r:.80} ({type(function).__name__}) "
            "and cannot be called. Name a function."
        )
    return function


def check_function_exists(spec: str, setting: Setting = REWARD.function) -> None:
    """Report what is wrong with `spec` as far as that shows without importing it.

    Raises:
        ConfigError: if the file or module does not exist or does not parse, or does not define the
            function; names the nearest one.
        MissingPackageError: if a built-in function needs a package that is not installed.
    """
    place, name = _parse_spec(spec, setting)
    if place:
        user_code.check_user_code(setting, spec)
    elif name == "math":
        check_math_verify_installed()
    elif name == "reasoning_gym":
        check_reasoning_gym_installed()


def find_parameters(
    function: str | RewardFunction, setting: Setting = REWARD.function
) -> list[inspect.Parameter] | None:
    """Return the parameters of a function without importing user code; None if only importing it
    would show them."""
    if isinstance(function, str) and not is_builtin_function(function):
        return user_code.parse_parameters(setting, function)
    return read_parameters(
        load_reward_function(function) if isinstance(function, str) else function
    )


def is_builtin_function(function: str | RewardFunction) -> bool:
    return isinstance(function, str) and not _parse_spec(function)[0]


def check_reward_functions(
    functions: Sequence[str | RewardFunction],
    weights: Sequence[float] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    watched: int = 0,
    settings: FunctionSettings = REWARD,
) -> None:
    """Report what is wrong with these settings as far as that shows without importing user code.

    Args:
        watched: Number of the last functions, which are recorded and not rewarded.

    Raises:
        ConfigError: if a file, module or function does not exist, the numbers differ, or there
            are options for a function or of a name that is not there.
        MissingPackageError: if a built-in function needs a package that is not installed.
    """
    if not functions:
        raise ConfigError(
            f"`{settings.function}` is empty; name a reward function, for instance `exact`."
        )
    named_by = settings.of_each(len(functions), watched)
    for function, setting in zip(functions, named_by, strict=True):
        if isinstance(function, str):
            check_function_exists(function, setting)
        elif not callable(function):
            raise ConfigError(
                f"`{setting}` holds {function!r}, expected the name of a reward function or a "
                "function."
            )
    names = make_short_names(list(functions))
    every = zip(functions, names, resolve_options(names, options, settings), named_by, strict=True)
    for function, name, given, setting in every:
        parameters = find_parameters(function, setting)
        if parameters is not None:
            _check_callable(function, name, parameters, given, settings)
        if function == "format":
            check_format_pattern(given["pattern"], settings.group / "options.format.pattern")
    weighed = settings.group / "weights"
    rewarded = len(functions) - watched
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(
            f"`{weighed}` has {len(weights) - watched} entries and `{settings.function}` has "
            f"{rewarded}; give one weight per function."
        )
    if weights is not None and not all(math.isfinite(weight) for weight in weights):
        raise ConfigError(f"`{weighed}` is {list(weights)}, expected finite numbers.")
    if weights is not None and rewarded and not any(weights):
        raise ConfigError(
            f"`{weighed}` is {list(weights)}, so every response would score 0. Weigh one of the "
            "functions."
        )


def check_functions_fit_columns(
    functions: Sequence[str | RewardFunction],
    options: Mapping[str, Mapping[str, Any]] | None,
    columns: Iterable[str],
    settings: FunctionSettings = REWARD,
) -> None:
    """Check that the data has the columns that the functions' parameters need.

    Args:
        columns: Names of a row's entries, but for the response.

    Raises:
        ConfigError: if one needs what there is not; names everything that there is.
    """
    names = make_short_names(list(functions))
    there = [name for name in columns if name != "response"]
    every = zip(functions, names, resolve_options(names, options, settings), strict=True)
    for function, name, given in every:
        if (parameters := find_parameters(function)) is not None:
            # First what is wrong with any data, in the same words: it is then told once.
            _check_callable(function, name, parameters, given, settings)
            check_parameters_in_columns(name, parameters, there, given, settings)


def _check_callable(
    function: str | RewardFunction,
    name: str,
    parameters: Sequence[inspect.Parameter],
    options: Mapping[str, Any],
    settings: FunctionSettings,
) -> None:
    """Check that a function can be called with these options, whatever columns the data has."""
    check_function_options(
        name, parameters, options, settings, complete=is_builtin_function(function)
    )
    check_call_signature(name, parameters)


def make_short_names(
    specs: Sequence[str | RewardFunction | PickledFunction], setting: Setting = REWARD.function
) -> list[str]:
    """Return a short name for each reward function, used in columns and messages: `score`,
    `file.score` if two functions share a name, and a number after a third."""
    parsed = [
        _parse_spec(spec, setting) if isinstance(spec, str) else ("", find_function_name(spec))
        for spec in specs
    ]
    plain = Counter(name for _, name in parsed)
    names = []
    for place, name in parsed:
        stem = Path(place).stem if user_code.is_file_path(place) else place.rpartition(".")[2]
        names.append(f"{stem}.{name}" if plain[name] > 1 and stem else name)
    return [
        f"{name}#{names[:i].count(name) + 1}" if name in names[:i] else name
        for i, name in enumerate(names)
    ]


def _parse_spec(spec: str, setting: Setting = REWARD.function) -> tuple[str, str]:
    """Split `place:function`; the place of a built-in function is empty."""
    if found := user_code.split_spec(spec):
        return found
    known = list_builtin_functions()
    if spec in known:
        return "", spec
    cure = (
        f"`{spec}:score`"
        if user_code.is_file_path(spec)
        else "`path/to/file.py:score` or `package.module:score` for a function of your own"
    )
    raise ConfigError(
        f"`{setting}` holds `{spec}`, which is no built-in reward function "
        f"({', '.join(known)}); write {cure}." + suggest_name(spec, known)
    )


def resolve_functions(settings: Any) -> tuple[list[str | RewardFunction], list[float]]:
    """Return the functions of a settings group and their weights: rewarded ones, then those that
    are only recorded (`check`), with weight 0.

    Args:
        settings: `RewardConfig`.
    """
    rewarded, watched = parse_function_list(settings.function), parse_function_list(settings.check)
    weights = [1.0] * len(rewarded) if settings.weights is None else list(settings.weights)
    return [*rewarded, *watched], [*weights, *[0.0] * len(watched)]


def needs_groups(settings: Any) -> bool:
    """Return whether a function may need all samples of a prompt, or of a rank, together, as far as
    that shows without importing user code."""
    for function in resolve_functions(settings)[0]:
        find = _find_named_parameters if isinstance(function, str) else read_parameters
        parameters = find(function)
        if parameters is None or find_call_scope(parameters) != "row":
            return True
    return False


_find_named_parameters = cache(find_parameters)
"""Called for each batch, and reads a file of the user's."""


def parse_function_list(
    functions: Any, setting: Setting = REWARD.function
) -> list[str | RewardFunction]:
    """Return the functions that a setting names or holds: none, one, or a list.

    Raises:
        ConfigError: if it is none of these.
    """
    if functions is None:
        return []
    if isinstance(functions, str) or callable(functions):
        return [functions]
    if not isinstance(functions, Sequence):
        raise ConfigError(
            f"`{setting}` is {functions!r}, expected the name of a reward function, such as "
            "`exact` or `path/to/file.py:score`, or a list of names."
        )
    return list(functions)
