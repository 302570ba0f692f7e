"""reasoning-gym, an optional package: its data sets make problems and verify answers."""

from __future__ import annotations

import importlib.util
import json
from functools import lru_cache
from typing import Any

from hybridrl.errors import MissingPackageError, pip_install


def check_reasoning_gym_installed() -> None:
    """Raise a `MissingPackageError` if reasoning-gym is not installed; nothing is imported."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise MissingPackageError(
            "data.task=reasoning_gym and the reward function `reasoning_gym` need the package "
            f"reasoning-gym: {pip_install('reasoning-gym', 'math-verify')}"
        )


@lru_cache(maxsize=256)
def build_reasoning_gym_dataset(task: str, options: str) -> Any:
    """Build reasoning-gym's data set of a task, cached by its parameters.

    Args:
        options: Parameters of the task, as JSON.
    """
    check_reasoning_gym_installed()
    from reasoning_gym import create_dataset

    return create_dataset(task, **json.loads(options))
