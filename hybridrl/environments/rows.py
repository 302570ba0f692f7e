"""The tasks that an environment brings itself."""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

from hybridrl.config.schema import EnvironmentConfig
from hybridrl.environments.environment_pool import EnvironmentPool
from hybridrl.errors import ConfigError

_LARGEST_SHARE = 0.2
"""Of the tasks, held out of few."""


def list_environment_tasks(
    config: EnvironmentConfig, count_held_out: int, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Ask the environment for its tasks, and split them into rows to learn from and rows to
    evaluate on.

    Args:
        count_held_out: How many to evaluate on; fewer if the environment has few.
        seed: Of their draw.

    Returns:
        Rows to learn from, at most `environment.tasks`, and rows to evaluate on. Each has a
        `prompt`, a text, and what the environment needs to play it.

    Raises:
        ConfigError: if there are none, or they are no rows.
    """
    with closing(EnvironmentPool(config)) as pool:
        rows = pool.rows(config.tasks + count_held_out)
    wrong = next((row for row in rows if not isinstance(row, dict)), None)
    if wrong is not None or not rows:
        shown = f"a task that is {wrong!r:.100}" if rows else "no tasks"
        raise ConfigError(
            f"environment.name={config.name} gave {shown}, expected dictionaries, one for each "
            "episode."
        )
    number = min(count_held_out, int(_LARGEST_SHARE * len(rows)))
    if len(rows) == config.tasks + count_held_out:
        number = count_held_out
    held_out = set(random.Random(seed).sample(range(len(rows)), number))
    # A prompt of no characters has no tokens; programs that open a conversation themselves may
    # have none.
    rows = [row | {"prompt": str(row.get("prompt") or "\n")} for row in rows]
    kept = [row for number, row in enumerate(rows) if number in held_out]
    return [row for number, row in enumerate(rows) if number not in held_out], kept


def check_environment_loads(config: EnvironmentConfig) -> None:
    """Load the environment once, to check that it can be loaded.

    Raises:
        ConfigError: if that fails; says why.
    """
    with closing(EnvironmentPool(config)) as pool:
        pool.load()
