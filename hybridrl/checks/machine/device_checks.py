"""The devices of this machine, and what its processes may do. It imports nothing heavy before it is
asked: the doctor looks at it, too."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError

if TYPE_CHECKING:
    from hybridrl.system.cluster_spec import ClusterSpec

MIN_OPEN_FILES = 256
"""With so many a job with Ray was seen to run."""


def check_open_files() -> None:
    """Refuse a limit below what a job needs, because the errors of Ray and vLLM name neither the
    limit nor the cure.

    Raises:
        ConfigError: if there may be fewer than a job needs.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < MIN_OPEN_FILES:
        can = limit < most or most < 0  # the shell may raise it as far as that
        raise ConfigError(
            f"A process may open {limit} files here (ulimit -n), and a job needs "
            f"{MIN_OPEN_FILES} or more. Write `ulimit -n 4096` before the command"
            f"{'' if can else ', as far as whoever set the limit lets you (ulimit -Hn)'}."
        )


def check_min_devices(config: Config, devices: int | None = None) -> None:
    """Refuse to wait for more devices than the job has.

    Args:
        devices: Their number; None: as the settings say, if they do.

    Raises:
        ConfigError: names `recover.min_devices`.
    """
    least, devices = config.recover.min_devices, devices or config.num_devices
    if least is not None and devices is not None and least > devices:
        raise ConfigError(
            f"recover.min_devices={least}: the job has only {devices} "
            f"{'device' if devices == 1 else 'devices'}. Set it to {devices} or less, or to null: "
            "the job then goes on with all of them or not at all."
        )


def devices_here(config: Config) -> ClusterSpec:
    """Return the devices that a job gets on this machine.

    Raises:
        ConfigError: if there are fewer than asked for.
    """
    import torch

    from hybridrl.system.cluster_spec import ClusterSpec, resolve_devices
    from hybridrl.system.cpu_cores import count_usable_cores

    inline = config.executor == "inline"
    cpus = 1 if inline else count_usable_cores()
    number = 1 if inline else config.num_devices
    gpus = torch.accelerator.device_count()
    return ClusterSpec.of_one_node(*resolve_devices(config.devices, number, gpus, cpus))


def build_preflight_cluster(config: Config) -> ClusterSpec | None:
    """Return the devices to check a placement against: those of this machine, or imaginary ones
    where it has fewer than requested, since a recipe may be checked on a laptop; None if only a
    cluster can tell."""
    from hybridrl.system.cluster_spec import ClusterSpec

    if config.ray.address is not None and config.num_devices is None:
        return None
    try:
        return devices_here(config)
    except ConfigError:
        if config.num_devices is None or config.num_devices < 1:
            return None
        kind = "cpu" if config.devices == "cpu" else "cuda"
        return ClusterSpec.of_one_node(kind, config.num_devices)
