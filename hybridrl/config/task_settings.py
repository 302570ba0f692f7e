"""Settings that belong to a built-in task, such as lengths and a learning rate. Where rows come
from elsewhere they have the values that they have without the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridrl.config.changed import apply_changes, read_setting
from hybridrl.config.schema import Config


class TaskName(str):
    """A value of `data.task` that a preset has set.

    Attributes:
        instead: Settings that the task's preset decides, with what they are without it. What the
            user or another preset says is not among them.
        is_default: Nobody has named any data.
    """

    instead: Mapping[str, Any] = {}
    is_default = False


def without_task(config: Config) -> Config:
    """Return the settings without the built-in task and without what its preset decides."""
    instead = getattr(config.data.task, "instead", {})
    return apply_changes(config, [("data.task", None), *instead.items()])


def with_task_noted(config: Config, instead: Mapping[str, Any], is_default: bool) -> Config:
    """Return the settings with a task that knows what its preset decides; see `TaskName`."""
    task = TaskName(config.data.task)
    task.instead, task.is_default = instead, is_default
    return apply_changes(config, [("data.task", task)])


def remark_on_task(config: Config) -> str:
    """Return a sentence on a model of the user's that learns a built-in task because no data is
    named; an empty text for any other job."""
    task = config.data.task
    if config.model.path is None or not getattr(task, "is_default", False):
        return ""
    return (
        f"No data is named, so {config.model.path} learns the built-in task {task}, with settings "
        f"for a tiny model ({said_by_task(config)}). Set data=jsonl data.path=<file>, or "
        f"data={task} if this is meant."
    )


def said_by_task(config: Config) -> str:
    """Format the settings that a task's preset decides, with their values."""
    names = getattr(config.data.task, "instead", {})
    return ", ".join(f"{name}={read_setting(config, name)}" for name in names)
