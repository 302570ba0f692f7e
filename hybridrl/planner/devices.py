"""Machines to plan for: accelerators that are known by name, or those of this machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from hybridrl.core.cluster import Cluster, Device
from hybridrl.errors import ConfigError, nearest

GIB = 2**30
DEVICES_PER_NODE = 8
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Accelerator:
    """Facts of a device, as its maker gives them.

    Attributes:
        memory: Bytes that a program can use.
        flops: Dense bfloat16 operations per second.
        bandwidth: Of its memory, bytes per second.
        link: To the other devices of its node, bytes per second in one direction.
        network: Of each device's share of the node's network, bytes per second.
    """

    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float


ACCELERATORS = {
    "A100-40GB": Accelerator(39.4 * GIB, 312e12, 1.56e12, 300e9, 25e9),
    "A100-80GB": Accelerator(79.2 * GIB, 312e12, 2.04e12, 300e9, 25e9),
    "H100": Accelerator(79.1 * GIB, 989e12, 3.35e12, 450e9, 50e9),
    "H200": Accelerator(139.8 * GIB, 989e12, 4.8e12, 450e9, 50e9),
    "B200": Accelerator(178.3 * GIB, 2250e12, 8.0e12, 900e9, 50e9),
    "L40S": Accelerator(44.4 * GIB, 362e12, 0.864e12, 32e9, 12.5e9),
    "L4": Accelerator(22.0 * GIB, 121e12, 0.3e12, 32e9, 12.5e9),
    "RTX4090": Accelerator(23.5 * GIB, 165e12, 1.008e12, 32e9, 12.5e9),
}
ALIASES = {"A100": "A100-80GB", "H100-80GB": "H100", "A100-SXM4-80GB": "A100-80GB"}


@dataclass(frozen=True)
class Machines:
    """What a plan is for.

    Attributes:
        cluster: The devices.
        name: Of one of them.
        memory: Bytes of one of them that a job may use.
        accelerator: What is known of it; None: a probe has to tell.
    """

    cluster: Cluster
    name: str
    memory: float
    accelerator: Accelerator | None = None

    @property
    def is_cuda(self) -> bool:
        """Whether its devices are GPUs."""
        return self.cluster.kind == "cuda"

    @property
    def devices_per_node(self) -> int:
        """Of the first node."""
        first = self.cluster.devices[0].node
        return sum(device.node == first for device in self.cluster.devices)


def named(text: str) -> Machines:
    """`64xH200`, or `16x8xH100`: 16 nodes of 8.

    Raises:
        ConfigError: for anything else.
    """
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z]\S*)", text)
    names = {name.lower(): name for name in (*ACCELERATORS, *ALIASES)}
    if found is None or found[3].lower() not in names or not int(found[2]):
        kind = found[3] if found else text
        raise ConfigError(
            f"--devices {text}: write a number and one of {', '.join(ACCELERATORS)}, such as "
            f"64xH200, or 16x8xH100 for 16 nodes of 8.{nearest(kind, ACCELERATORS)}"
        )
    name = names[found[3].lower()]
    name = ALIASES.get(name, name)
    nodes, per_node = int(found[1] or 0), int(found[2])
    if not found[1]:
        total, per_node = per_node, min(per_node, DEVICES_PER_NODE)
    else:
        total = nodes * per_node
    devices = [Device("cuda", f"node{i // per_node}", i % per_node) for i in range(total)]
    return Machines(Cluster(devices), name, ACCELERATORS[name].memory, ACCELERATORS[name])


def present(cluster: Cluster) -> Machines:
    """The devices of a job, which are here, or like those that are here."""
    if cluster.kind == "cuda" and torch.accelerator.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Machines(cluster, properties.name, properties.total_memory)
    machines = Machines(cluster, "CPU slot", 0)
    return Machines(cluster, "CPU slot", node_memory() / machines.devices_per_node)


def node_memory() -> float:
    """Bytes that the processes of this machine may use together."""
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
    total = float(psutil.virtual_memory().total)
    return total if limit == "max" else min(total, float(limit))


def cores_per_device(cluster: Cluster) -> int:
    """Threads of each CPU slot."""
    return max(1, (os.cpu_count() or 1) // Machines(cluster, "", 0).devices_per_node)
