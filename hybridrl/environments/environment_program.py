"""The program of an environment process: `<python> environment_program.py`, started by the pool.

It needs only Python's standard library, for it runs in the Python of the environment. It loads an
adapter and plays episodes by it; whatever they print goes to the standard error output.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ADAPTER_PACKAGE = "environment_adapters"
"""The name under which the folder of adapters is a package here."""
NO_PROXY = ("no_proxy", "NO_PROXY")
LOOPBACK = ("127.0.0.1", "localhost")
_LONGEST_TEXT = 8000
_HERE = Path(__file__).resolve().parent


class EnvironmentProgram:
    """See `child.ItemServer`. The payload of an item is `{"play": episode}` or `{"rows": count}`.

    Args:
        child: The module.
    """

    def __init__(self, child: types.ModuleType) -> None:
        self._child = child

    async def start(self, setup: dict[str, Any], server: Any) -> None:
        """Loads the adapter; its errors are sentences."""
        _load_adapters()
        sys.path += [place for place in setup["search_path"] if place not in sys.path]
        self._server = server
        self._words = importlib.import_module(f"{ADAPTER_PACKAGE}.environment_adapter")
        try:
            package = importlib.import_module(f"{ADAPTER_PACKAGE}.{setup['adapter']}")
        except ModuleNotFoundError as error:
            raise self._words.EnvironmentSetupError(
                f"it needs the package `{error.name}`, which is not installed there. Install it, "
                "or set environment.python to the Python of a virtual environment that has it."
            ) from error
        self._adapter = package.Adapter(setup["options"], setup["name"])
        await self._adapter.start()

    async def run(self, payload: dict[str, Any]) -> Any:
        if "rows" in payload:
            return await self._adapter.rows(payload["rows"])
        episode = self._words.AdapterEpisode(**payload["play"])
        host = urlsplit(episode.url).hostname or ""
        os.environ.update(with_direct_access(os.environ, host))
        try:
            return vars(self._words.parse_episode_score(await self._adapter.play(episode)))
        finally:
            if episode.is_left_running:
                self._server.wear_out()

    def explain(self, error: BaseException) -> tuple[str, str]:
        """The kind of failure, and what to say of it."""
        if type(error).__name__ == "EnvironmentSetupError":
            return "refused", str(error)
        if type(error).__name__ == "EpisodeError":
            return error.kind, _shortened(str(error))  # type: ignore[attr-defined]
        loading = [str(_HERE / "adapters" / f"{n}.py") for n in ("function", "environment_adapter")]
        ours = (__file__, self._child.__file__, *loading)
        said = self._child.traceback_of(error, ours)
        return "memory" if isinstance(error, MemoryError) else "error", _shortened(said)


def with_direct_access(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Return environment variables with which HTTP clients ask no proxy for these hosts: what reads
    `http_proxy` looks for exceptions in `no_proxy` or in `NO_PROXY`."""
    known = ",".join(environment.get(name, "") for name in NO_PROXY).split(",")
    names = dict.fromkeys(filter(None, [*map(str.strip, known), *hosts]))
    wanted = "*" if "*" in names else ",".join(names)
    return {**environment, **dict.fromkeys(NO_PROXY, wanted)}


def _shortened(text: str) -> str:
    half = _LONGEST_TEXT // 2
    return text if len(text) <= _LONGEST_TEXT else f"{text[:half]}\n[...]\n{text[-half:]}"


def _load_adapters() -> None:
    """Register the folder of adapters as a package, and remove this folder from the search path:
    its file names also occur in environments."""
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != _HERE]
    package = types.ModuleType(ADAPTER_PACKAGE)
    package.__path__ = [str(_HERE / "adapters")]
    sys.modules[ADAPTER_PACKAGE] = package


def _load_child() -> types.ModuleType:
    """`hybridrl.processes.child`, from its file."""
    file = _HERE.parent / "processes" / "child.py"
    spec = importlib.util.spec_from_file_location("hybridrl_process_child", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    child = _load_child()
    messages = child.Messages(lambda said: json.dumps(said, default=str).encode(), json.loads)
    child.ItemServer(EnvironmentProgram(child), messages).serve()
