"""The devices of this machine, as the settings name them."""

from __future__ import annotations

from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.system.cluster_spec import ClusterSpec, find_local_cluster


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
    number = 1 if config.executor == "inline" else config.num_devices
    return find_local_cluster(config.devices, number)


def build_preflight_cluster(config: Config) -> ClusterSpec | None:
    """Return the devices to check a placement against: those of this machine, or imaginary ones
    where it has fewer than requested, since a recipe may be checked on a laptop; None if only a
    cluster can tell."""
    if config.ray.address is not None and config.num_devices is None:
        return None
    try:
        return devices_here(config)
    except ConfigError:
        if config.num_devices is None:
            return None
        kind = "cpu" if config.devices == "cpu" else "cuda"
        return ClusterSpec.of_one_node(kind, config.num_devices)
