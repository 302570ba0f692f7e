"""The registry of adapters, and the interpreter that runs one."""

from __future__ import annotations

import os
import pkgutil
import shutil
import sys
from pathlib import Path

from hybridrl.config.schema import EnvironmentConfig
from hybridrl.environments import adapters
from hybridrl.errors import ConfigError, suggest_name
from hybridrl.system import user_code

_NOT_ADAPTERS = {"environment_adapter", "function", "model_client", "tool_servers"}


def list_adapters() -> list[str]:
    found = {module.name for module in pkgutil.iter_modules(adapters.__path__)}
    return sorted(found - _NOT_ADAPTERS)


def resolve_adapter(config: EnvironmentConfig) -> str:
    """Return the adapter that `environment.name` needs.

    Raises:
        ConfigError: if it is neither an adapter nor a function; names the nearest.
    """
    name, known = str(config.name), list_adapters()
    if name in known:
        return name
    if user_code.split_spec(name) is None:
        raise ConfigError(
            f"environment.name={name}: must be one of {', '.join(known)}, or a function of yours, "
            f"`path/to/file.py:name`.{suggest_name(name, known)}"
        )
    if user_code.is_file_path(name.rpartition(":")[0]):
        user_code.check_user_code("environment.name", name)
    return "function"


def find_interpreter(config: EnvironmentConfig) -> str:
    """Return the path of the Python that runs the environment.

    Raises:
        ConfigError: if there is none.
    """
    if config.python is None:
        return sys.executable
    place = Path(config.python).expanduser()
    if place.is_dir():
        place = place / "bin" / "python"
    found = shutil.which(str(place))
    if found is None or not os.access(found, os.X_OK):
        raise ConfigError(
            f"environment.python={config.python}: there is no such program. Give the Python of a "
            "virtual environment, `path/to/venv/bin/python`, or null for the one that runs the job."
        )
    return found
