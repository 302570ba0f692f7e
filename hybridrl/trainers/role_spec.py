"""RoleSpec, the description of one role of a driver program.

Nothing else is known of a role anywhere: where it is placed, what it takes of a device, whether it
is warmed up, saved and trained all follows from here and from `models.<role>` of the settings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hybridrl.config.role_models import RemoteModelConfig, parse_role_model
from hybridrl.config.schema import Config
from hybridrl.controller import Worker
from hybridrl.errors import ConfigError, suggest_name

ACTOR_ROLE = "actor"
"""The role that warm-up trains, and that `model.path` and `actor` of the settings are about."""


@dataclass(frozen=True)
class WorkerDefaults:
    """The defaults of a `RoleSpec` for one kind of worker."""

    trains: bool = False
    generates: bool = False
    scalar: bool = False
    copies_actor: bool = False
    takes: tuple[str, ...] = ("path", "parallel")
    has_model: bool = True


WORKER_DEFAULTS = {
    "actor": WorkerDefaults(
        trains=True,
        generates=True,
        copies_actor=True,
        takes=("path", "parallel", "optimizer", "precision"),
    ),
    "critic": WorkerDefaults(
        trains=True, scalar=True, copies_actor=True, takes=("path", "parallel", "optimizer")
    ),
    "reference": WorkerDefaults(copies_actor=True, takes=("path", "parallel", "precision")),
    "reward": WorkerDefaults(scalar=True, takes=("parallel", "precision")),
    "cost": WorkerDefaults(scalar=True, takes=("parallel", "precision")),
    "reward_model": WorkerDefaults(
        trains=True, scalar=True, takes=("path", "parallel", "optimizer")
    ),
    "meta_reward_model": WorkerDefaults(
        trains=True, scalar=True, takes=("path", "parallel", "optimizer")
    ),
    "remote_teacher": WorkerDefaults(
        takes=tuple(one.name for one in fields(RemoteModelConfig)), has_model=False
    ),
}
"""The built-in workers, by the name that a `RoleSpec` gives."""
SCORING_WORKERS = ("reward", "cost")
"""The kinds whose model is optional and set elsewhere: by `reward.model` and `cost.model`."""


@dataclass(frozen=True)
class RoleSpec:
    """A role of a driver program. Fields that are None take the default of the kind of worker.

    Attributes:
        worker: A built-in kind (`actor`, `critic`, `reference`, `reward`, `cost`, `reward_model`,
            `meta_reward_model`, `remote_teacher`), or a subclass of `hybridrl.controller.Worker`.
        keywords: Arguments of the worker beyond the usual ones, or instead of them. A class of the
            user's gets those of the usual ones that its `__init__` names; see
            `hybridrl.job.worker_groups`.
        trains: Whether its model is trained; others only score.
        generates: Whether it samples responses and so needs a rollout engine.
        scalar: Whether its model ends in one number, not in a distribution over tokens.
        saves_as: The folder of the run folder in which its model is kept; None: it is not.
        copies_actor: Whether it begins as a copy of the actor as it is after warm-up, unless
            `models.<role>.path` names another beginning.
        takes: Settings that stand under `models.<role>`: `path`, `parallel`, `optimizer`,
            `precision`; any other goes to the worker as a keyword.
    """

    worker: str | type[Worker]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    trains: bool | None = None
    generates: bool | None = None
    scalar: bool | None = None
    saves_as: str | None = None
    copies_actor: bool | None = None
    takes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        usual = WorkerDefaults()
        if isinstance(self.worker, str):
            if self.worker not in WORKER_DEFAULTS:
                raise ConfigError(
                    f"There is no kind of worker `{self.worker}`; there are "
                    f"{', '.join(WORKER_DEFAULTS)}, or give a subclass of "
                    f"hybridrl.controller.Worker.{suggest_name(self.worker, WORKER_DEFAULTS)}"
                )
            usual = WORKER_DEFAULTS[self.worker]
        elif not (inspect.isclass(self.worker) and issubclass(self.worker, Worker)):
            raise ConfigError(
                f"The worker {self.worker!r} of a role must be one of "
                f"{', '.join(WORKER_DEFAULTS)}, or a subclass of hybridrl.controller.Worker."
            )
        saves = usual.trains if isinstance(self.worker, str) else hasattr(self.worker, "save_model")
        if self.saves_as is not None and not re.fullmatch(r"\w[\w.-]*", self.saves_as):
            raise ConfigError(
                f"saves_as={self.saves_as!r}: must be the name of a folder in the run folder, "
                "of letters, digits, `_`, `-` and dots."
            )
        if self.saves_as is not None and not saves:
            raise ConfigError(
                f"RoleSpec({self.worker!r}, saves_as={self.saves_as!r}): what is saved needs a "
                "worker with the method `save_model`, and this one has none. Leave saves_as out."
            )
        for name in ("trains", "generates", "scalar", "copies_actor", "takes"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(usual, name))

    def path(self, role: str, config: Config) -> str | None:
        """Return the setting's path of the role's model; None if it is `model.path`."""
        if self.worker in SCORING_WORKERS:
            scoring = getattr(config, str(self.worker))
            return scoring.model if scoring is not None else None
        return parse_role_model(config, role).path

    def has_model(self, role: str, config: Config) -> bool:
        """Return whether the role holds a model that is sharded over its devices; functions and
        judges do not."""
        if self.worker in SCORING_WORKERS:
            return bool(self.path(role, config))
        if isinstance(self.worker, str):
            return WORKER_DEFAULTS[self.worker].has_model
        return "source" in inspect.signature(self.worker.__init__).parameters

    @property
    def keeps_state(self) -> bool:
        """True if its workers can be saved during a run and resume from there."""
        if isinstance(self.worker, str):
            return WORKER_DEFAULTS[self.worker].trains
        return hasattr(self.worker, "save_state") and hasattr(self.worker, "load_state")

    def is_copy(self, role: str, config: Config) -> bool:
        """Return whether the role starts as a copy of the warmed-up actor."""
        return bool(self.copies_actor) and role != ACTOR_ROLE and self.path(role, config) is None

    def is_actor_without_adapters(self, role: str, config: Config) -> bool:
        """Return whether the actor plays this role too: with LoRA it is its own reference."""
        has_adapters = config.actor.lora.rank is not None
        return self.worker == "reference" and has_adapters and self.path(role, config) is None


STANDARD_ROLES = {
    "actor": RoleSpec("actor", saves_as="model"),
    "critic": RoleSpec("critic", saves_as="critic"),
    "cost_critic": RoleSpec("critic", {"prefix": "cost_"}, saves_as="cost_critic"),
    "reference": RoleSpec("reference"),
    "reward": RoleSpec("reward"),
    "cost": RoleSpec("cost"),
    "reward_model": RoleSpec("reward_model", saves_as="model"),
}
"""The roles of the built-in programs, by the names that their settings and metrics have."""
LEARNER_ROLE = replace(STANDARD_ROLES["actor"], generates=False)
"""An actor that learns and never samples."""


def standard_roles(*names: str) -> dict[str, RoleSpec]:
    """Return the specs of these built-in roles.

    Raises:
        ConfigError: for a name that is none of them.
    """
    for name in names:
        if name not in STANDARD_ROLES:
            raise ConfigError(
                f"There is no role `{name}`; there are {', '.join(STANDARD_ROLES)}. A role of your "
                "own is described by a RoleSpec of "
                f"hybridrl.trainers.role_spec.{suggest_name(name, STANDARD_ROLES)}"
            )
    return {name: STANDARD_ROLES[name] for name in names}


def find_playing_role(roles: Mapping[str, RoleSpec], role: str, config: Config) -> str:
    """Return the role whose workers play this one."""
    spec = roles.get(role)
    return ACTOR_ROLE if spec and spec.is_actor_without_adapters(role, config) else role


def validate_roles(
    found: Mapping[str, RoleSpec] | Sequence[str], where: str
) -> dict[str, RoleSpec]:
    """Return roles as a mapping to specs, given such a mapping or a list of names of standard
    roles.

    Args:
        where: Who gives them, for errors.

    Raises:
        ConfigError: if they are neither, or two of them are saved in one folder.
    """
    if not isinstance(found, Mapping):
        return standard_roles(*found)
    folders: dict[str, str] = {}
    for name, spec in found.items():
        if not isinstance(spec, RoleSpec):
            raise ConfigError(
                f"{where} describes the role `{name}` by {spec!r}, which is no RoleSpec of "
                "hybridrl.trainers.role_spec."
            )
        if spec.saves_as is None:
            continue
        if spec.saves_as in folders:
            raise ConfigError(
                f"{where} saves both `{folders[spec.saves_as]}` and `{name}` in the folder "
                f"`{spec.saves_as}`. Give one of them another saves_as."
            )
        folders[spec.saves_as] = name
    return dict(found)
