"""User code referenced by name: `path/to/file.py:name` or `package.module:name`.

`check_user_code` finds what can be found wrong without importing anything, which takes no time and
has no side effect; `load_user_code` imports it. Both name the setting that the name comes from.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from hybridrl.errors import ConfigError, suggest_name

_FILE_MODULE_PREFIX = "user file "
"""Before the path in the name of a module that was a file."""


def split_spec(spec: str) -> tuple[str, str] | None:
    """Split `place:name` into the place and the name; None if `spec` does not have that form."""
    place, colon, name = spec.rpartition(":")
    return (place, name) if colon and place and name.isidentifier() else None


def is_file_path(place: str) -> bool:
    """Return whether a place is a file path and not a dotted module name."""
    return place.endswith(".py") or "/" in place


def resolve_user_object(setting: str, spec: str, known: Mapping[str, Any]) -> Any:
    """Return the object that a setting names: one of `known`, or the user's own.

    Raises:
        ConfigError: if it is neither.
    """
    if spec in known:
        return known[spec]
    if split_spec(spec) is None:
        raise ConfigError(
            f"{setting}={spec}: must be one of {', '.join(known)}, or one of yours, "
            f"`path/to/file.py:name`.{suggest_name(spec, known)}"
        )
    return load_user_code(setting, spec)


def check_user_code(setting: str, spec: str) -> None:
    """Check without importing that the file or module exists and defines the name.

    Raises:
        ConfigError: if one of them does not exist, or the file is no valid Python; names the
            nearest.
    """
    source, name = _find_source(setting, spec)
    if source is None:
        return
    try:
        tree = ast.parse(source.read_bytes(), filename=str(source))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"`{setting}` names `{spec}`, but {source} is no valid Python: {error}"
        ) from error
    defined = list(_defined_names(tree.body))
    if name not in defined and not {"*", "__getattr__"} & set(defined):
        raise _no_such_name(setting, spec, name, defined)


def parse_parameters(setting: str, spec: str) -> list[inspect.Parameter] | None:
    """Return the parameters of the function that a file or module defines under the name, without
    importing it; None if they cannot be determined.

    Raises:
        ConfigError: as `check_user_code` does.
    """
    source, name = _find_source(setting, spec)
    if source is None:
        return None
    bound = [
        node
        for node in ast.parse(source.read_bytes()).body
        if name in _defined_names([node]) and not isinstance(node, ast.Import | ast.ImportFrom)
    ]
    node: ast.AST | None = bound[-1] if bound else None
    if isinstance(node, ast.Assign | ast.AnnAssign):
        node = node.value
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return None
    if getattr(node, "decorator_list", None):
        return None
    # Of a function with these parameters that does nothing; its defaults are None.
    given, nothing = node.args, ast.Constant(None)
    given.defaults = [nothing for _ in given.defaults]
    given.kw_defaults = [default and nothing for default in given.kw_defaults]
    empty = ast.fix_missing_locations(ast.Expression(ast.Lambda(given, nothing)))
    signature = inspect.signature(eval(compile(empty, "<parameters>", "eval")))
    return list(signature.parameters.values())


def load_user_code(setting: str, spec: str) -> Any:
    """Import the file or module and return the object of this name.

    Raises:
        ConfigError: as `check_user_code` does; and if importing raises, with the traceback of that.
    """
    check_user_code(setting, spec)
    place, name = _split(setting, spec)
    try:
        module = _load_file(Path(place)) if is_file_path(place) else importlib.import_module(place)
    except BaseException as error:  # a user's module may even call sys.exit
        frames = _strip_import_frames(error.__traceback__)
        lines = traceback.format_exception(type(error), error, frames)
        raise ConfigError(
            f"`{setting}` names `{spec}`, and importing it raised "
            f"{type(error).__name__}: {error}\n{''.join(lines)}"
        ) from error
    if not hasattr(module, name):
        known = [known for known in vars(module) if not known.startswith("_")]
        raise _no_such_name(setting, spec, name, known)
    return getattr(module, name)


def _strip_import_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the user's own code on, without the frames that import it."""
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if file not in (__file__, importlib.__file__) and not file.startswith("<frozen importlib"):
            break
        frames = frames.tb_next
    return frames


def list_loaded_files() -> list[ModuleType]:
    """Return the modules of user files that this process has loaded."""
    modules = list(sys.modules.items())  # at once: other threads may be importing
    return [module for name, module in modules if name.startswith(_FILE_MODULE_PREFIX)]


def _split(setting: str, spec: str) -> tuple[str, str]:
    found = split_spec(spec)
    if found is None:
        raise ConfigError(
            f"`{setting}` is `{spec}`; write `path/to/file.py:Name` or `package.module:Name`."
        )
    return found


def _find_source(setting: str, spec: str) -> tuple[Path | None, str]:
    """Return the Python file that a file or module is, None if that cannot be determined, and the
    name in it."""
    place, name = _split(setting, spec)
    source = (_find_file if is_file_path(place) else _find_module)(setting, spec, place, name)
    return (source if source is not None and source.suffix == ".py" else None), name


def _find_file(setting: str, spec: str, place: str, name: str) -> Path:
    file = Path(place).expanduser()
    if not file.is_file():
        siblings = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ConfigError(
            f"`{setting}` names `{spec}`, but there is no file `{place}` (seen from "
            f"{Path.cwd()})." + suggest_name(file.name, siblings)
        )
    return file


def _find_module(setting: str, spec: str, place: str, name: str) -> Path | None:
    """Return the module's file without importing its packages; None if it cannot be determined."""
    search: list[str] | None = None
    parts = place.split(".")
    for depth in range(len(parts)):
        found = PathFinder.find_spec(".".join(parts[: depth + 1]), search)
        if found is None:
            if importlib.util.find_spec(parts[0]) is not None and depth == 0:
                return None  # found by another finder: an editable install, a zip file
            raise ConfigError(
                f"`{setting}` names `{spec}`, but there is no module "
                f"`{'.'.join(parts[: depth + 1])}`. Install it, run where it can be imported, or "
                f"give the path of its file: `path/to/file.py:{name}`."
            )
        search = list(found.submodule_search_locations or [])
    return Path(found.origin) if found is not None and found.origin else None


def _load_file(file: Path) -> ModuleType:
    file = file.expanduser().resolve()
    # Like a script, the file may import its neighbours; they come last, so they shadow nothing.
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    name = f"{_FILE_MODULE_PREFIX}{file}"
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


def _no_such_name(setting: str, spec: str, name: str, known: list[str]) -> ConfigError:
    return ConfigError(
        f"`{setting}` names `{spec}`, but that file defines no `{name}`; it defines "
        f"{', '.join(sorted(set(known))) or 'nothing'}." + suggest_name(name, known)
    )


def _defined_names(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names bound at module level, also inside `if`, `try` and `with`."""
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
