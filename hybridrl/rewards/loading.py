"""Finding reward functions: `path/to/file.py:score`, `package.module:score`, or a built-in name."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridrl.errors import ConfigError, RewardError, nearest

RewardFunction = Callable[..., Any]


def builtin_names() -> list[str]:
    """The names of the built-in reward functions, sorted."""
    from hybridrl.rewards import builtin

    return sorted(
        name
        for name, value in vars(builtin).items()
        if inspect.isfunction(value) and "answer" in inspect.signature(value).parameters
    )


def load_function(spec: str) -> RewardFunction:
    """Imports and returns the reward function that `spec` names.

    Raises:
        ConfigError: if the file, the module or the function does not exist.
        RewardError: if importing its file raises, or the name stands for something not callable.
    """
    place, name = _parse(spec)
    if not place:
        from hybridrl.rewards import builtin

        return getattr(builtin, name)  # type: ignore[no-any-return]
    check_function(spec)
    try:
        module = _load_file(Path(place)) if _is_file(place) else importlib.import_module(place)
    except BaseException as error:  # a user's module may even call sys.exit
        lines = traceback.format_exception(error)
        raise RewardError(
            f"`reward.function` names `{spec}`, and importing it raised "
            f"{type(error).__name__}: {error}\n{''.join(lines)}"
        ) from error
    if not hasattr(module, name):
        raise _no_such_function(spec, name, [n for n in vars(module) if not n.startswith("_")])
    function = getattr(module, name)
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
    """
    place, name = _parse(spec)
    if not place:
        return
    source = _find_file(spec, place) if _is_file(place) else _find_module(spec, place)
    if source is None or source.suffix != ".py":
        return
    try:
        tree = ast.parse(source.read_bytes(), filename=str(source))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"`reward.function` names `{spec}`, but {source} is no valid Python: {error}"
        ) from error
    defined = list(_defined_names(tree.body))
    if name not in defined and not {"*", "__getattr__"} & set(defined):
        raise _no_such_function(spec, name, defined)


def short_names(specs: list[str]) -> list[str]:
    """A name for each reward function, for columns and messages: `score`, or `file.score` where
    two functions have the same name; a third of the same name gets a number."""
    parsed = [_parse(spec) for spec in specs]
    plain = Counter(name for _, name in parsed)
    names = []
    for place, name in parsed:
        stem = Path(place).stem if _is_file(place) else place.rpartition(".")[2]
        names.append(f"{stem}.{name}" if plain[name] > 1 and stem else name)
    return [
        f"{name}#{names[:i].count(name) + 1}" if name in names[:i] else name
        for i, name in enumerate(names)
    ]


def _parse(spec: str) -> tuple[str, str]:
    """Splits `place:function`; the place of a built-in function is empty."""
    place, colon, name = spec.rpartition(":")
    if colon and place and name.isidentifier():
        return place, name
    known = builtin_names()
    if spec in known:
        return "", spec
    cure = (
        f"`{spec}:score`"
        if _is_file(spec)
        else "`path/to/file.py:score` or `package.module:score` for a function of your own"
    )
    raise ConfigError(
        f"`reward.function` holds `{spec}`, which is no built-in reward function "
        f"({', '.join(known)}); write {cure}." + nearest(spec, known)
    )


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def _find_file(spec: str, place: str) -> Path:
    file = Path(place).expanduser()
    if not file.is_file():
        siblings = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ConfigError(
            f"`reward.function` names `{spec}`, but there is no file `{place}` (seen from "
            f"{Path.cwd()})." + nearest(file.name, siblings)
        )
    return file


def _find_module(spec: str, place: str) -> Path | None:
    """The module's file, found without importing its packages; None if it cannot be told."""
    search: list[str] | None = None
    parts = place.split(".")
    for depth in range(len(parts)):
        found = PathFinder.find_spec(".".join(parts[: depth + 1]), search)
        if found is None:
            if importlib.util.find_spec(parts[0]) is not None and depth == 0:
                return None  # found by another finder: an editable install, a zip file
            raise ConfigError(
                f"`reward.function` names `{spec}`, but there is no module "
                f"`{'.'.join(parts[: depth + 1])}`. Install it, run where it can be imported, or "
                "give the path of its file: `path/to/file.py:score`."
            )
        search = list(found.submodule_search_locations or [])
    return Path(found.origin) if found is not None and found.origin else None


def _load_file(file: Path) -> ModuleType:
    file = file.expanduser().resolve()
    # Like a script, the file may import its neighbours; they come last, so they shadow nothing.
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    name = f"reward file {file}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _no_such_function(spec: str, name: str, known: list[str]) -> ConfigError:
    return ConfigError(
        f"`reward.function` names `{spec}`, but that file defines no `{name}`; it defines "
        f"{', '.join(sorted(set(known))) or 'nothing'}." + nearest(name, known)
    )


def _defined_names(body: list[ast.stmt]) -> Iterator[str]:
    """Names bound at module level, also inside `if`, `try` and `with`."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.split(".")[0] for alias in statement.names)
            continue
        for node in ast.iter_child_nodes(statement):
            yield from (
                n.id
                for n in ast.walk(node)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            )
        for block in ("body", "orelse", "finalbody"):
            yield from _defined_names(getattr(statement, block, []))
        for handler in getattr(statement, "handlers", []):
            yield from _defined_names(handler.body)


def function_list(setting: str | Sequence[str]) -> list[str]:
    """The functions that `reward.function` names: one, or a list."""
    return [setting] if isinstance(setting, str) else list(setting)
