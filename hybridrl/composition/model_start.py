"""Model folders of earlier runs: a run or checkpoint folder may stand for the model in it, also as
the baseline of evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hybridrl.config.constraints import ValidPath
from hybridrl.config.schema import Config, RewardConfig
from hybridrl.errors import ConfigError
from hybridrl.run_files.run_paths import LATEST_LINK

_Scores = TypeVar("_Scores", bound=RewardConfig)
ACTOR_ROLE, _REWARD_MODEL_ROLE = "actor", "reward_model"
"""Roles whose models others begin as."""


def resolve_run_models(config: Config) -> Config:
    """Replace run and checkpoint folders in the settings by the model folders in them.

    Raises:
        ConfigError: for a run or a step without such a model.
    """
    model, cost = config.model, config.cost
    tokenizer = resolve_model_folder(model.tokenizer, "model.tokenizer", ACTOR_ROLE)
    model = replace(
        model, path=resolve_model_folder(model.path, "model.path", ACTOR_ROLE), tokenizer=tokenizer
    )
    baseline = config.eval.baseline
    if baseline is not None and not ValidPath().refusal(baseline):
        config = replace(config, eval=replace(config.eval, baseline=_resolve_latest(baseline)))
    return replace(
        config,
        model=model,
        models={
            role: _resolve_role_model(role, settings) for role, settings in config.models.items()
        },
        reward=_resolve_reward_models("reward", config.reward),
        cost=None if cost is None else _resolve_reward_models("cost", cost),
    )


def resolve_model_folder(path: str | None, setting: str, *roles: str) -> str | None:
    """Resolve a path to a model folder: the path itself, the first of these roles in a checkpoint,
    or the final model of a run.

    Raises:
        ConfigError: if a run or a step has none of them; names the setting.
    """
    if path is None or ValidPath().refusal(path):  # what cannot be a path, checks tell of
        return path
    path = _resolve_latest(str(Path(path).expanduser()) if path.startswith("~") else path)
    folder = Path(path)
    if (folder / "config.json").is_file():
        return path
    if (folder / "complete.json").is_file():
        names, what = [*roles], "a step of a run"
    elif (folder / "config.yaml").is_file():
        names, what = (
            [*(role for role in roles if role not in (ACTOR_ROLE, _REWARD_MODEL_ROLE)), "model"],
            "a run",
        )
    else:
        return path
    found = next((folder / name for name in names if (folder / name).is_dir()), None)
    if found is None:
        raise ConfigError(
            f"{setting}={path} is {what} that has none of the models that this could mean: "
            f"{', '.join(names)}. Name a model folder, or one of the steps in a run's checkpoints."
        )
    return str(found)


def _resolve_latest(path: str) -> str:
    """Replace the link to the newest run in a path by that run's name, because workers resolve it
    later, when it points to this run."""
    folder = Path(path).expanduser()
    for place in (folder, *folder.parents):
        if place.name == LATEST_LINK and place.is_symlink():
            return str(place.parent / place.readlink() / folder.relative_to(place))
    return path


def _resolve_role_model(role: str, settings: Any) -> Any:
    if not isinstance(settings, Mapping) or not isinstance(settings.get("path"), str):
        return settings
    path = resolve_model_folder(
        settings["path"], f"models.{role}.path", role, ACTOR_ROLE, _REWARD_MODEL_ROLE
    )
    return {**settings, "path": path}


def _resolve_reward_models(kind: str, scores: _Scores) -> _Scores:
    judge = scores.judge
    judge = replace(judge, path=resolve_model_folder(judge.path, f"{kind}.judge.path", ACTOR_ROLE))
    return replace(
        scores,
        model=resolve_model_folder(scores.model, f"{kind}.model", _REWARD_MODEL_ROLE, kind),
        judge=judge,
    )
