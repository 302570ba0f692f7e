"""Checks of the settings of checkpoints, and of resuming from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.resume import AUTO, find_source
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.system.locations import parse_location
from hybridrl.trainers import load_roles, load_trainer
from hybridrl.trainers.role_spec import RoleSpec


def check_checkpoints(config: Config, roles: Mapping[str, RoleSpec] | None = None) -> None:
    """Refuse settings of checkpoints, resume or fork that cannot work.

    Args:
        roles: Of a job, where they are not its trainer's.

    Raises:
        ConfigError: names the setting, or the role that cannot be saved.
    """
    find_source(config)
    checkpoint = config.checkpoint
    for name, value in (("resume", config.resume), ("fork", config.fork)):
        if value is not None and not load_trainer(config.trainer.name).TRAINS:
            raise ConfigError(
                f"{name}={value}: trainer.name={config.trainer.name} trains nothing, so there is "
                f"nothing to go on with. Leave {name} out."
            )
    if not checkpoint.wanted:
        if config.guard.on_nan == "rewind":
            raise ConfigError(
                "guard.on_nan=rewind without checkpoint.every: there would be nothing to go back "
                "to. Set checkpoint.every to a number of steps."
            )
        if config.resume == AUTO:
            raise ConfigError(
                "resume=auto without checkpoint.every: no run of this command would leave anything "
                "to resume. Set checkpoint.every to a number of steps."
            )
        return
    if checkpoint.folder is not None:
        folder = parse_location(checkpoint.folder)  # refuses what nothing is known of
        run = config.run.directory
        if run is not None and isinstance(folder, Path) and folder.resolve() == Path(run).resolve():
            raise ConfigError(
                f"checkpoint.folder={checkpoint.folder} is run.directory itself. Leave it out: "
                "checkpoints then are in the run's `checkpoints`."
            )
    roles = load_roles(config) if roles is None else roles
    _check_memory_copies(config, roles)
    for role, spec in roles.items():
        worker: Any = spec.worker
        if spec.trains and not spec.keeps_state:
            raise ConfigError(
                f"checkpoint.every={checkpoint.every}: the role `{role}` trains, and its "
                f"worker {worker.__name__} has no `save_state(folder)` and `load_state(folder)`. "
                "Give it both "
                "(hybridrl.checkpoint.engine_state.training_state has them for an engine), or set "
                "checkpoint.every=0."
            )


def _check_memory_copies(config: Config, roles: Mapping[str, RoleSpec]) -> None:
    copies = config.checkpoint.memory_copies
    if copies and config.executor == "inline":
        raise ConfigError(
            f"checkpoint.memory_copies={copies}: with executor=inline there is one process, and "
            "what is in its memory is lost with it. Set executor=ray or checkpoint.memory_copies=0."
        )
    if copies and not config.checkpoint.asynchronous:
        raise ConfigError(
            f"checkpoint.memory_copies={copies}: the copy that goes to memory is the one of "
            "checkpoint.asynchronous=true. Set that, or checkpoint.memory_copies=0."
        )
    for role, spec in roles.items():
        worker = spec.worker
        if not copies or not spec.trains or isinstance(worker, str):  # the library's own have it
            continue
        if not hasattr(worker, "start_saving"):
            raise ConfigError(
                f"checkpoint.memory_copies={copies}: the role `{role}` trains, and its worker "
                f"{worker.__name__} has no `start_saving(folder, copy)`. Derive it from "
                "hybridrl.workers.model_worker.TrainedModelWorker, or set "
                "checkpoint.memory_copies=0."
            )
