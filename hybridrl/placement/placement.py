"""Placement: which role lives on which devices, as plain data that a person can read and edit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.config.schema import ParallelConfig
from hybridrl.errors import ConfigError

ACTOR_ROLE, GENERATOR_ROLE = "actor", "generator"
"""The policy, and the role that generates for it where that has devices and weights of its own."""


@dataclass(frozen=True)
class RoleRequirements:
    """The requirements of a role that a strategy has to know.

    Attributes:
        trains: Whether it learns; others only score.
        parallel: How its model is to be cut.
        generation: How it is to be cut while it generates; None: it does not generate.
    """

    name: str
    trains: bool = False
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    generation: ParallelConfig | None = None


@dataclass(frozen=True)
class RolePlace:
    """The devices of a role, and how its model is cut over them.

    Attributes:
        devices: Numbers of devices of the cluster, in rank order.
        parallel: How its model is cut over them.
    """

    devices: tuple[int, ...]
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


@dataclass(frozen=True)
class Placement:
    """The place of every role.

    Attributes:
        strategy: The name of what made it.
        roles: By name. With a `generator` among them, generation has its own copy of the weights.
    """

    strategy: str
    roles: Mapping[str, RolePlace]

    @property
    def is_separated(self) -> bool:
        """True if generation has its own devices and weights."""
        return GENERATOR_ROLE in self.roles

    def co_residents(self, role: str) -> list[str]:
        """Return the roles that share a device with this one."""
        mine = set(self.roles[role].devices)
        return [
            name
            for name, place in self.roles.items()
            if name != role and mine.intersection(place.devices)
        ]

    def to_json(self) -> str:
        """Return the placement as JSON text, with colocated roles written out for the reader."""
        roles = {
            name: {
                "devices": list(place.devices),
                "parallel": _list_changed_sizes(place.parallel),
                "co_residents": self.co_residents(name),
            }
            for name, place in self.roles.items()
        }
        return json.dumps({"strategy": self.strategy, "roles": roles}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Placement:
        """Read what `to_json` wrote, or a person edited; `parallel` may be left out.

        Raises:
            ConfigError: if it is no placement.
        """
        try:
            read = json.loads(text)
            roles = {name: _parse_role_place(place) for name, place in read["roles"].items()}
            return cls(str(read.get("strategy", "file")), roles)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"This is no placement: {type(error).__name__}: {error}. Expected "
                '{"roles": {"actor": {"devices": [0, 1], "parallel": {"tp": 2}}, ...}}, as in the '
                "placement.json of every run."
            ) from error

    @classmethod
    def load(cls, path: str) -> Placement:
        """Load the placement of a file.

        Raises:
            ConfigError: if there is no such file, or it holds no placement.
        """
        if not Path(path).is_file():
            raise ConfigError(f"placement.path={path}: there is no such file.")
        try:
            return cls.from_json(Path(path).read_text())
        except ConfigError as error:
            raise ConfigError(f"placement.path={path}: {error}") from error


def _parse_role_place(read: Mapping[str, Any]) -> RolePlace:
    return RolePlace(tuple(map(int, read["devices"])), ParallelConfig(**read.get("parallel", {})))


def _list_changed_sizes(parallel: ParallelConfig) -> dict[str, int]:
    """Return the sizes that differ from the defaults, for the reader."""
    default = asdict(ParallelConfig())
    return {name: size for name, size in asdict(parallel).items() if size != default[name]}
