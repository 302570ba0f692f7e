"""The devices that a job may use, as plain data that a placement can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU slot: what a host process is bound to."""

    kind: str
    node: str
    index: int


@dataclass(frozen=True)
class Cluster:
    """Every device of the job, nodes one after the other."""

    devices: Sequence[Device]

    @property
    def kind(self) -> str:
        """`cpu` or `cuda`: a job runs on devices of one kind."""
        return self.devices[0].kind
