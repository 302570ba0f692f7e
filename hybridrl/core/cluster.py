"""The devices that a job may use, as plain data that a placement can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridrl.errors import ConfigError

DEFAULT_CPU_SLOTS = 2


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

    @classmethod
    def of_one_node(cls, kind: str, number: int, node: str = "localhost") -> Cluster:
        """So many devices of a kind in one machine."""
        return cls([Device(kind, node, index) for index in range(number)])


def choose_devices(devices: str, number: int | None, gpus: int, cpus: int) -> tuple[str, int]:
    """The kind and number of devices that a job gets.

    Args:
        devices: `cpu`, `cuda`, or `auto` (GPUs if there are any).
        number: How many; None: every GPU, or two CPU slots.
        gpus, cpus: What there is.

    Raises:
        ConfigError: if there are fewer than asked for.
    """
    kind = devices if devices != "auto" else ("cuda" if gpus else "cpu")
    there = gpus if kind == "cuda" else cpus
    wanted = number or (gpus if kind == "cuda" else min(DEFAULT_CPU_SLOTS, cpus))
    if not there:
        raise ConfigError("devices=cuda: no GPU was found. Set devices=cpu or devices=auto.")
    if not 1 <= wanted <= there:
        what = "GPUs" if kind == "cuda" else "CPU cores"
        raise ConfigError(
            f"num_devices={wanted}: there are {there} {what}. Set num_devices={there} or fewer"
            + (", or join a larger Ray cluster with ray.address=..." if wanted > there else ".")
        )
    return kind, wanted
