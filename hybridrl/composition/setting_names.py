"""The names of all settings, and suggestions for unknown ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from hybridrl.composition.aliases import explain_alias
from hybridrl.config.presets import DEFAULT_PRESETS
from hybridrl.config.schema import Config
from hybridrl.config.setting_types import is_group, read_type_hints, strip_annotations
from hybridrl.errors import ConfigError, suggest_name

OPEN_SETTINGS = (
    *("reward.options", "cost.options", "algorithm.loss_options", "placement.roles", "models"),
    *("rollout.engine_options", "environment.options", "eval.sets"),
    *("data.task_options", "data.sampler_options", "data.sources", "data.chat_template_options"),
)
"""Settings below which any name may stand: the user's, those of a loss, roles, tasks, vLLM's or an
environment's; checked with them."""
OLD_SETTINGS = {"observe": ("timeline_every",)}
"""Settings that there are no more, by group; `config.yaml` of earlier runs has them."""
_NAME = re.compile(r"[^\W\d][\w-]*")


def without_old_settings(stored: Any) -> Any:
    """Return the settings of a run's `config.yaml` without those that there are no more."""
    if not isinstance(stored, dict):
        return stored
    groups = {name: stored[name] for name in OLD_SETTINGS if isinstance(stored.get(name), dict)}
    return stored | {
        name: {key: value for key, value in group.items() if key not in OLD_SETTINGS[name]}
        for name, group in groups.items()
    }


@cache
def list_settings(group: Any = Config, prefix: str = "") -> Mapping[str, Any]:
    """List the types of all settings by dotted name."""
    found: dict[str, Any] = {}
    for name, hint in read_type_hints(group).items():
        if is_group(hint):
            found |= list_settings(strip_annotations(hint), f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = hint
    return found


def is_open_setting(key: str) -> bool:
    """Return whether any name may stand below this setting, or it is below such a setting."""
    return any(key == name or key.startswith(f"{name}.") for name in OPEN_SETTINGS)


def check_setting_name(key: str, value: str = "", arguments: Iterable[str] = ()) -> None:
    """Refuse a key that is neither a setting, a group of settings, nor a preset.

    Args:
        value: What the user set it to.
        arguments: The whole command line. From both, values of other libraries are converted.

    Raises:
        ConfigError: with what may be meant.
    """
    known = list_settings()
    if is_open_setting(key):
        if all(_NAME.fullmatch(part) for part in key.split(".")):
            return
        raise ConfigError(f"`{key}` is no name; names have letters, digits, `_` and dots between.")
    if key in known or key in DEFAULT_PRESETS or any(name.startswith(f"{key}.") for name in known):
        return
    raise ConfigError(
        f"There is no setting `{key}`.{_suggest_setting(key, list(known), value, arguments)}"
    )


def _suggest_setting(key: str, known: list[str], value: str, arguments: Iterable[str]) -> str:
    """Suggest what an unknown key may mean: an alias of another library, else a name that differs
    by a letter or two, else the settings with the same last word, else the closest name."""
    if key.split(".")[0].split("/")[0] == "hydra":
        return " Jobs keep their files in run.root, or in run.directory; nothing else is Hydra's."
    if told := explain_alias(key, value, arguments):
        return f" {told}"
    names = [*known, *DEFAULT_PRESETS]
    last = key.rsplit(".", 1)[-1]
    same = [f"`{name}`" for name in known if name.rsplit(".", 1)[-1] == last]
    same.sort(key=lambda name: name.count("."))
    if same and not difflib.get_close_matches(key, names, n=1, cutoff=0.85):
        return f" Did you mean {' or '.join(same[:4])}?"
    return suggest_name(key, names) or " `--cfg job` shows all settings."
