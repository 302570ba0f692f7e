"""The adapter of a user's function: `play(row, model)` plays an episode and returns its reward."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from .environment_adapter import (
    AdapterEpisode,
    EnvironmentAdapter,
    EnvironmentSetupError,
    EpisodeReturn,
    import_file,
)
from .model_client import AsyncModelClient, ModelClient


class Adapter(EnvironmentAdapter):
    """An adapter for `async def play(row, model)`, or for a plain function, which gets a thread per
    episode.

    It returns a number, or a dictionary with `reward`, `turn_rewards` and `metrics`, or None where
    only `reward.function` scores. The options are further keyword arguments. A
    function `rows(count)` beside it gives tasks of its own.
    """

    def __init__(self, options: dict[str, Any], name: str) -> None:
        super().__init__(options, name)
        place, _, attribute = name.rpartition(":")
        self._module = _load_module(place)
        self._play: Any = getattr(self._module, attribute, None)
        if not callable(self._play):
            known = [one for one in vars(self._module) if not one.startswith("_")]
            raise EnvironmentSetupError(
                f"environment.name={name}: {place} defines no function `{attribute}`; it defines "
                f"{', '.join(known) or 'nothing'}."
            )
        try:
            inspect.signature(self._play).bind({}, None, **options)
        except TypeError as error:
            shown = "".join(f", {key}={value!r}" for key, value in options.items())
            raise EnvironmentSetupError(
                f"environment.name={name} cannot be called as {attribute}(row, model{shown}): "
                f"{error}."
            ) from error

    async def play(self, episode: AdapterEpisode) -> EpisodeReturn:
        function = self._play
        inner = function if inspect.isroutine(function) else type(function).__call__
        if inspect.iscoroutinefunction(inner):
            model = AsyncModelClient(episode)
            returned: EpisodeReturn = await self._play(episode.row, model, **self.options)
            return returned
        return await self._in_thread(episode)

    async def _in_thread(self, episode: AdapterEpisode) -> EpisodeReturn:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[EpisodeReturn] = loop.create_future()

        def finish(setter: Any, value: Any) -> None:
            if not done.done():
                setter(value)

        def run() -> None:
            try:
                returned = self._play(episode.row, ModelClient(episode), **self.options)
            except BaseException as error:
                if isinstance(error, StopIteration):  # a future cannot hold one
                    error = RuntimeError(f"StopIteration: {error}")
                loop.call_soon_threadsafe(finish, done.set_exception, error)
            else:
                loop.call_soon_threadsafe(finish, done.set_result, returned)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            return await done
        finally:
            episode.is_left_running = not done.done() or done.cancelled()

    async def rows(self, count: int) -> list[dict[str, Any]]:
        own = getattr(self._module, "rows", None)
        if own is None:
            return await super().rows(count)
        found = own(count)
        return list(itertools.islice(await found if inspect.isawaitable(found) else found, count))


def _load_module(place: str) -> ModuleType:
    """Import the module at a path or of a dotted name."""
    if not (place.endswith(".py") or "/" in place):
        return importlib.import_module(place)
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise EnvironmentSetupError(f"environment.name: there is no file {file}.")
    return import_file(file, f"environment_of_{file.stem}")
