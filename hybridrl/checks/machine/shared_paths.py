"""The paths that workers read and write, which every node of a cluster must see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridrl.config.role_models import list_model_paths
from hybridrl.config.schema import Config
from hybridrl.rewards.loading import parse_function_list
from hybridrl.system import user_code
from hybridrl.system.locations import is_url, parse_location


def list_worker_paths(config: Config, run_directory: Path) -> dict[str, Path]:
    """List the paths of workers by setting. Hub names are left out, because each node downloads
    them."""
    paths = {_run_setting(config): run_directory}
    read = list_model_paths(config)
    read["rollout.plan"] = config.rollout.plan
    read["checkpoint.folder"] = config.checkpoint.folder  # which the driver has made
    code: dict[str, list[Any]] = {
        "rollout.episode": [config.rollout.episode],
        "algorithm.policy_loss": [config.algorithm.policy_loss],
        "algorithm.advantage": [config.algorithm.advantage],
        "actor.optimizer.name": [config.actor.optimizer.name],
    }
    for kind, scores in (("reward", config.reward), ("cost", config.cost)):
        if scores is not None:
            code[f"{kind}.function"] = parse_function_list(scores.function)
            code[f"{kind}.check"] = parse_function_list(scores.check)
    for setting, path in read.items():
        if path and Path(path).expanduser().exists():
            paths[setting] = Path(path).expanduser()
    for setting, specs in code.items():
        for spec in specs:
            place = user_code.split_spec(spec) if isinstance(spec, str) else None
            if place and user_code.is_file_path(place[0]):
                paths[setting] = Path(place[0]).expanduser()
    return paths


def folders_of_workers(config: Config, run_directory: Path) -> tuple[dict[str, str], list[str]]:
    """Return the folders and URLs that workers read, by setting, and the settings of those that
    they write to."""
    checkpoints = config.checkpoint
    written = {_run_setting(config): str(run_directory.absolute())}
    if checkpoints.folder is not None and checkpoints.wanted:
        written["checkpoint.folder"] = str(parse_location(checkpoints.folder).absolute())
    named = {"resume": config.resume, "fork": config.fork}
    read = {setting: url for setting, url in named.items() if url and is_url(url)}
    return written | read, list(written)


def _run_setting(config: Config) -> str:
    return "run.directory" if config.run.directory else "run.root"
