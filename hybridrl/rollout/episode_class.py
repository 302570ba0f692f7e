"""The class of the user's that the setting `rollout.episode` names."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from hybridrl.batch.turn import Episode
from hybridrl.errors import ConfigError
from hybridrl.system import user_code

_SETTING = "rollout.episode"


def check_episode_class(spec: str) -> None:
    """Refuse a file, module or class that does not exist, without importing it.

    Raises:
        ConfigError: names the nearest that exists.
    """
    user_code.check_user_code(_SETTING, spec)


def load_episode_class(spec: str) -> Callable[[], Episode]:
    """Import the class, which is built without arguments for each sample.

    Raises:
        ConfigError: if it cannot be imported, or lacks `async def reset` or `async def step`.
    """
    found = user_code.load_user_code(_SETTING, spec)
    if not inspect.isclass(found):
        raise ConfigError(
            f"`{_SETTING}` names `{spec}`, which is a {type(found).__name__}; it must be a class."
        )
    for name in ("reset", "step"):
        if not inspect.iscoroutinefunction(getattr(found, name, None)):
            raise ConfigError(
                f"`{_SETTING}` names `{spec}`, which has no `async def {name}`. An episode has "
                "`async def reset(self, row)` and `async def step(self, response_text, "
                "response_ids)`; see hybridrl.Episode."
            )
    return found  # type: ignore[no-any-return]
