"""Model folders of earlier runs: a run or checkpoint folder may stand for the model in it, also as
the baseline of evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hybridrl.config.constraints import NotLonger
from hybridrl.config.schema import Config, RewardConfig
from hybridrl.errors import ConfigError
from hybridrl.run_files.run_paths import LATEST

Scores = TypeVar("Scores", bound=RewardConfig)
ACTOR, LEARNED = "actor", "reward_model"
"""Roles whose models others begin as."""


def with_model_folders(config: Config) -> Config:
    """Replace run and checkpoint folders in the settings by the model folders in them.

    Raises:
        ConfigError: for a run or a step without such a model.
    """
    model, cost = config.model, config.cost
    tokenizer = model_folder(model.tokenizer, "model.tokenizer", ACTOR)
    model = replace(model, path=model_folder(model.path, "model.path", ACTOR), tokenizer=tokenizer)
    baseline = config.eval.baseline
    if baseline is not None and not NotLonger().refusal(baseline):
        config = replace(config, eval=replace(config.eval, baseline=_of_now(baseline)))
    return replace(
        config,
        model=model,
        models={role: _role(role, settings) for role, settings in config.models.items()},
        reward=_scores("reward", config.reward),
        cost=None if cost is None else _scores("cost", cost),
    )


def model_folder(path: str | None, setting: str, *roles: str) -> str | None:
    """Resolve a path to a model folder: the path itself, the first of these roles in a checkpoint,
    or the final model of a run.

    Raises:
        ConfigError: if a run or a step has none of them; names the setting.
    """
    if path is None or NotLonger().refusal(path):  # what cannot be a path, checks tell of
        return path
    path = _of_now(str(Path(path).expanduser()) if path.startswith("~") else path)
    folder = Path(path)
    if (folder / "config.json").is_file():
        return path
    if (folder / "complete.json").is_file():
        names, what = [*roles], "a step of a run"
    elif (folder / "config.yaml").is_file():
        names, what = [*(role for role in roles if role not in (ACTOR, LEARNED)), "model"], "a run"
    else:
        return path
    found = next((folder / name for name in names if (folder / name).is_dir()), None)
    if found is None:
        raise ConfigError(
            f"{setting}={path} is {what} that has none of the models that this could mean: "
            f"{', '.join(names)}. Name a model folder, or one of the steps in a run's checkpoints."
        )
    return str(found)


def _of_now(path: str) -> str:
    """Replace the link to the newest run in a path by that run's name, because workers resolve it
    later, when it points to this run."""
    folder = Path(path).expanduser()
    for place in (folder, *folder.parents):
        if place.name == LATEST and place.is_symlink():
            return str(place.parent / place.readlink() / folder.relative_to(place))
    return path


def _role(role: str, settings: Any) -> Any:
    if not isinstance(settings, Mapping) or not isinstance(settings.get("path"), str):
        return settings
    path = model_folder(settings["path"], f"models.{role}.path", role, ACTOR, LEARNED)
    return {**settings, "path": path}


def _scores(kind: str, scores: Scores) -> Scores:
    judge = scores.judge
    judge = replace(judge, path=model_folder(judge.path, f"{kind}.judge.path", ACTOR))
    return replace(
        scores, model=model_folder(scores.model, f"{kind}.model", LEARNED, kind), judge=judge
    )
