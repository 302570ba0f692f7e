"""Finding reward functions: `path/to/file.py:score`, `package.module:score`, or a built-in name."""

from __future__ import annotations

import inspect
import math
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hybridrl.core import user_code
from hybridrl.errors import ConfigError, RewardError, nearest
from hybridrl.rewards.options import check_options, options_of, parameters_of
from hybridrl.rewards.signature import check_signature

SETTING = "reward.function"
_FIRST = ["prompt", "response"]  # parameters, by which a reward function is told from its helpers
RewardFunction = Callable[..., Any]


class ByValue(NamedTuple):
    """A reward function that travels as a pickle, because it has no name by which a reward process
    could import it."""

    name: str
    pickle: bytes

    @classmethod
    def of(cls, function: RewardFunction) -> ByValue:
        """Pickles a function with what it refers to.

        Raises:
            RewardError: if that cannot be pickled.
        """
        import cloudpickle

        name, inner = name_of(function), getattr(function, "func", function)
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


def name_of(function: RewardFunction) -> str:
    """The name of a function, or of the class of an object that is called like one."""
    inner = getattr(function, "func", function)  # of a functools.partial
    return str(getattr(inner, "__name__", type(inner).__name__)).strip("<>")


def builtin_names() -> list[str]:
    """The names of the built-in reward functions, sorted."""
    from hybridrl.rewards import builtin

    return sorted(
        name
        for name, value in vars(builtin).items()
        if inspect.isfunction(value) and list(inspect.signature(value).parameters)[:2] == _FIRST
    )


def load_function(spec: str | ByValue) -> RewardFunction:
    """Imports and returns the reward function that `spec` names, or is.

    Raises:
        ConfigError: if the file, the module or the function does not exist.
        RewardError: if importing its file raises, or the name stands for something not callable.
    """
    if isinstance(spec, ByValue):
        return pickle.loads(spec.pickle)  # type: ignore[no-any-return]
    place, name = _parse(spec)
    if not place:
        from hybridrl.rewards import builtin

        return getattr(builtin, name)  # type: ignore[no-any-return]
    function = user_code.load(SETTING, spec, RewardError)
    if not callable(function):
        raise RewardError(
            f"`reward.function` names `{spec}`, which is a {type(function).__name__}, no function."
        )
    return function  # type: ignore[no-any-return]


def check_function(spec: str) -> None:
    """Finds what can be found wrong with `spec` without importing it, which takes no time.

    Raises:
        ConfigError: if the file or module does not exist or does not parse, or does not define the
            function; names the nearest one.
        MissingPackageError: if a built-in function needs a package that is not installed.
    """
    place, name = _parse(spec)
    if place:
        user_code.check(SETTING, spec)
    elif name == "math":
        from hybridrl.rewards.mathematics import check_installed

        check_installed()


def check_functions(
    functions: Sequence[str | RewardFunction],
    weights: Sequence[float] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Finds what is wrong with these settings without importing anything of the user's; so
    options of the user's functions are held against their parameters at the start only.

    Raises:
        ConfigError: if a file, module or function does not exist, the numbers differ, or there
            are options for a function or of a name that is not there.
        MissingPackageError: if a built-in function needs a package that is not installed.
    """
    if not functions:
        raise ConfigError(
            "`reward.function` is empty; name a reward function, for instance `exact`."
        )
    for function in functions:
        if isinstance(function, str):
            check_function(function)
        elif not callable(function):
            raise ConfigError(
                f"`reward.function` holds {function!r}, expected the name of a reward function or "
                "a function."
            )
    names = short_names(list(functions))
    for function, name, given in zip(functions, names, options_of(names, options), strict=True):
        if not isinstance(function, str):
            check_options(name, function, given)
            check_signature(name, parameters_of(function))
        elif not _parse(function)[0]:
            check_options(name, load_function(function), given, complete=True)
        elif (parameters := user_code.parameters(function)) is not None:
            check_signature(name, parameters)
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(
            f"`reward.weights` has {len(weights)} entries and `reward.function` has "
            f"{len(functions)}; give one weight per function."
        )
    if weights is not None and not all(math.isfinite(weight) for weight in weights):
        raise ConfigError(f"`reward.weights` is {list(weights)}, expected finite numbers.")


def short_names(specs: Sequence[str | RewardFunction | ByValue]) -> list[str]:
    """A name for each reward function, for columns and messages: `score`, or `file.score` where
    two functions have the same name; a third of the same name gets a number."""
    parsed = [_parse(spec) if isinstance(spec, str) else ("", _given_name(spec)) for spec in specs]
    plain = Counter(name for _, name in parsed)
    names = []
    for place, name in parsed:
        stem = Path(place).stem if user_code.is_file(place) else place.rpartition(".")[2]
        names.append(f"{stem}.{name}" if plain[name] > 1 and stem else name)
    return [
        f"{name}#{names[:i].count(name) + 1}" if name in names[:i] else name
        for i, name in enumerate(names)
    ]


def _parse(spec: str) -> tuple[str, str]:
    """Splits `place:function`; the place of a built-in function is empty."""
    if found := user_code.split(spec):
        return found
    known = builtin_names()
    if spec in known:
        return "", spec
    cure = (
        f"`{spec}:score`"
        if user_code.is_file(spec)
        else "`path/to/file.py:score` or `package.module:score` for a function of your own"
    )
    raise ConfigError(
        f"`reward.function` holds `{spec}`, which is no built-in reward function "
        f"({', '.join(known)}); write {cure}." + nearest(spec, known)
    )


def _given_name(function: RewardFunction | ByValue) -> str:
    return function.name if isinstance(function, ByValue) else name_of(function)


def function_list(setting: Any) -> list[str | RewardFunction]:
    """The functions that `reward.function` names or holds: none, one, or a list."""
    if setting is None:
        return []
    return [setting] if isinstance(setting, str) or callable(setting) else list(setting)
