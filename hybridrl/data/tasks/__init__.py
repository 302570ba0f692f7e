"""Built-in tasks: problems with checkable answers that need no file and no download.

A task is a module with a string `CHARACTERS`, all characters its prompts and answers use, and a
function `problems(count_held_out, seed)` that returns the training and the held-out problems as
dictionaries with the keys `prompt` and `answer`. For preference training it also has a function
`pairs(count_held_out, seed)`, whose rows have the keys `prompt`, `chosen` and `rejected`. Where a
right answer takes several turns it has a function `examples(count_held_out, seed)` for supervised
training, whose rows have the keys `prompt` and `turns`: what the model writes, what a tool says,
what the model writes then, and so on. A module put into this folder is a task, and so is any
importable module whose dotted name is given.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType

import numpy as np

from hybridrl.config.setting import Setting
from hybridrl.data.row_origin import RowOrigin
from hybridrl.errors import ConfigError, suggest_name


def list_tasks() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_task(name: str, setting: Setting = Setting("data.task")) -> ModuleType:
    """Return the task module with this name.

    Raises:
        ConfigError: if there is no such task, or the module is no task; names the nearest one.
    """
    known = list_tasks()
    if "." in name:
        try:
            task = importlib.import_module(name)
        except (Exception, SystemExit) as error:  # it is the user's
            raise ConfigError(
                f"`{setting}` is `{name}`, and importing that module failed: "
                f"{type(error).__name__}: {error}. Give the dotted name of an importable module, "
                f"or a built-in task: {', '.join(known)}."
            ) from error
    elif name in known:
        task = importlib.import_module(f"{__name__}.{name}")
    else:
        raise ConfigError(
            f"`{setting}` is `{name}`, which is no built-in task; there is {', '.join(known)}. A "
            "task of your own is given as the dotted name of its module."
            + suggest_name(name, known)
        )
    missing = [part for part in ("CHARACTERS", "problems") if not hasattr(task, part)]
    if missing:
        raise ConfigError(
            f"`{setting}` is `{name}`, but that module has no `{'` and no `'.join(missing)}`. A "
            "task needs `CHARACTERS` (a string) and `problems(count_held_out, seed)`."
        )
    if not isinstance(task.CHARACTERS, str):
        raise ConfigError(
            f"`{setting}` is `{name}`, and `CHARACTERS` of that module is {task.CHARACTERS!r}, "
            "expected a string of all characters that prompts and answers use."
        )
    return task


def split_problems(
    task: str,
    operands: int,
    make: Callable[[int, int], dict[str, str]],
    count_held_out: int,
    seed: int,
    origin: RowOrigin,
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the problems of all pairs of operands, shuffled by `seed` and split into
    `(train, held_out)`.

    Args:
        operands: Number of operands; `make` is called with numbers from 0.

    Raises:
        ConfigError: if `count_held_out` leaves nothing to train on.
    """
    total = operands**2
    if not 0 <= count_held_out < total:
        raise ConfigError(
            f"`{origin.held_out}` is {count_held_out}, but `{task}` has {total} problems and "
            f"at least one must be left for training: give a number from 0 to {total - 1}."
        )
    order = np.random.default_rng(seed).permutation(total).tolist()
    rows = [make(*divmod(number, operands)) for number in order]
    return rows[count_held_out:], rows[:count_held_out]
