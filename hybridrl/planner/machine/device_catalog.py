"""Clusters to plan for: of accelerators that are known by name, of a file, or of this machine."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from hybridrl.errors import ConfigError, suggest_name
from hybridrl.system.cluster_spec import (
    MAX_DEVICES,
    ClusterSpec,
    DeviceSlot,
    DeviceSpec,
    LinkSpec,
    NodeSpec,
)
from hybridrl.system.container_limits import read_container_memory
from hybridrl.system.device_traits import read_gpu_name_and_memory

GIB = 2**30
_DEFAULT_DEVICES_PER_NODE = 8
_CPU_SLOT = "CPU slot"
_INTRA_NODE_LATENCY, _NETWORK_LATENCY = 5e-6, 20e-6
"""Seconds until the first byte of a message is there, of links that were not measured."""


def _maker(
    memory: float,
    flops: tuple[float, float, float],
    bandwidth: float,
    link: float,
    network: float,
    host_link: float = 20,
) -> tuple[DeviceSpec, NodeSpec]:
    """Build the specification of a device, and of the host that it is usually in, from its maker's
    figures.

    Args:
        memory: GiB that a program can use.
        flops: 10^12 dense operations per second in float32, bfloat16 and int8.
        bandwidth: Of its memory, 10^12 bytes per second.
        link: To the other devices of its node, 10^9 bytes per second in one direction.
        network: Its share of the node's network, 10^9 bytes per second.
        host_link: To the memory of its host, 10^9 bytes per second in one direction: by PCIe 4, or
            by PCIe 5 as copies of 7 GiB were seen to go on an H100.
    """
    rates = dict(zip(("float32", "bfloat16", "int8"), (f * 1e12 for f in flops), strict=True))
    model = DeviceSpec(memory * GIB, rates, bandwidth * 1e12, host_link=host_link * 1e9)
    return model, NodeSpec(
        LinkSpec(link * 1e9, _INTRA_NODE_LATENCY), LinkSpec(network * 1e9, _NETWORK_LATENCY)
    )


ACCELERATORS = {
    "A100-40GB": _maker(39.4, (19.5, 312, 624), 1.56, 300, 25),
    "A100-80GB": _maker(79.2, (19.5, 312, 624), 2.04, 300, 25),
    "H100": _maker(79.1, (67, 989, 1979), 3.35, 450, 50, 45),
    "H200": _maker(139.8, (67, 989, 1979), 4.8, 450, 50, 45),
    "B200": _maker(178.3, (75, 2250, 4500), 8.0, 900, 50, 45),
    "L40S": _maker(44.4, (91.6, 362, 733), 0.864, 32, 12.5),
    "L4": _maker(22.0, (30.3, 121, 242), 0.3, 32, 12.5),
    "RTX4090": _maker(23.5, (82.6, 165, 660), 1.008, 32, 12.5),
}
_ACCELERATOR_ALIASES = {"A100": "A100-80GB", "H100-80GB": "H100", "A100-SXM4-80GB": "A100-80GB"}

_GROUP = re.compile(
    r"(?:([1-9]\d*)x)?([1-9]\d*)x([A-Za-z][^@]*)(?:@([1-9]\d*(?:\.\d+)?)([GM])bps)?"
)
_BYTES = {"G": 1e9 / 8, "M": 1e6 / 8}
_RATE = re.compile(r"([1-9]\d*(?:\.\d+)?)([GM])(?:bps|bit/s)")


def parse_cluster(text: str) -> ClusterSpec:
    """Parse a `--devices` text: `64xH200`; `16x8xH100`, 16 nodes of 8; `8xL4,16xH100@400Gbps`,
    several kinds with the network rate of each device; or a JSON file of a cluster.

    Raises:
        ConfigError: for anything else.
    """
    if text.endswith(".json"):
        return load_cluster(text)
    devices: list[DeviceSlot] = []
    models: dict[str, DeviceSpec] = {}
    hosts: dict[str, NodeSpec] = {}
    for group in text.split(","):
        number, per_node, name, network = _group(text, group.strip())
        if len(devices) + number > MAX_DEVICES:
            raise ConfigError(f"--devices {text}: there may be up to {MAX_DEVICES:,} devices.")
        models[name], host = ACCELERATORS[name]
        if network:
            host = replace(host, network=LinkSpec(network, _NETWORK_LATENCY))
        first = len(hosts)
        for index in range(number):
            node = f"node{first + index // per_node}"
            hosts[node] = host
            devices.append(DeviceSlot("cuda", node, index % per_node, name))
    return ClusterSpec(devices, models, hosts)


def _group(text: str, group: str) -> tuple[int, int, str, float]:
    """Parse one group of a `--devices` text: the number of devices, devices per node, their model,
    and network bytes per second (0: as usual)."""
    names = {name.lower(): name for name in (*ACCELERATORS, *_ACCELERATOR_ALIASES)}
    found = _GROUP.fullmatch(group)
    if found is None or found[3].lower() not in names:
        kind = found[3] if found else group
        raise ConfigError(
            f"--devices {text}: write a number and one of {', '.join(ACCELERATORS)}, such as "
            "64xH200, or 16x8xH100 for 16 nodes of 8, or 8xL4,16xH100@400Gbps; or name a JSON "
            f"file of a cluster.{suggest_name(kind, ACCELERATORS)}"
        )
    nodes, per_node, name = found[1], int(found[2]), names[found[3].lower()]
    number = int(nodes) * per_node if nodes else per_node
    if not nodes:
        per_node = min(per_node, _DEFAULT_DEVICES_PER_NODE)
    network = float(found[4]) * _BYTES[found[5]] if found[4] else 0.0
    return number, per_node, _ACCELERATOR_ALIASES.get(name, name), network


def parse_link(setting: str, text: str) -> LinkSpec:
    """Parse a rate such as `400Gbps` as a link between nodes.

    Args:
        setting: For messages.

    Raises:
        ConfigError: for anything else.
    """
    if (found := _RATE.fullmatch(text)) is None:
        raise ConfigError(f"{setting}: write a rate such as 400Gbps or 100Mbps, or 2x.")
    return LinkSpec(float(found[1]) * _BYTES[found[2]], _NETWORK_LATENCY)


def load_cluster(path: str) -> ClusterSpec:
    """Load a cluster from a JSON file.

    Raises:
        ConfigError: if there is no such file, or it holds no cluster.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"--devices {path}: there is no such file.")
    try:
        cluster = ClusterSpec.from_json(file.read_text(encoding="utf-8"))
    except ConfigError as error:
        raise ConfigError(f"--devices {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--devices {path}: this is no text in UTF-8.") from error
    # CPU slots are what this machine has, too, and can be measured here.
    if not cluster.rates_known and cluster.model_names != [_CPU_SLOT]:
        raise ConfigError(
            f"--devices {path}: it does not say how fast its devices and links are. Write `flops` "
            "and `bandwidth` of each model and an entry in `hosts` for each node, as `hybridrl "
            "cluster probe --json` prints them."
        )
    return cluster


def add_device_memory(cluster: ClusterSpec) -> ClusterSpec:
    """Return the job's cluster with the memory of its devices, as their hosts reported it, or like
    that of this machine's devices.

    Raises:
        ConfigError: for accelerators of which nobody knows anything.
    """
    if all(name in cluster.models for name in cluster.model_names):
        return cluster
    if not cluster.is_cuda:
        name, memory = _CPU_SLOT, read_node_memory() / cluster.devices_per_node
    elif torch.accelerator.is_available():
        name, memory = read_gpu_name_and_memory()
    else:
        raise ConfigError(
            "There is no GPU here to see what the job's GPUs are like. Name them: --devices 8xH100."
        )
    devices = [replace(device, model=name) for device in cluster.devices]
    return ClusterSpec(devices, {name: DeviceSpec(memory)})


def is_seen(cluster: ClusterSpec) -> bool:
    """Return whether this machine can tell what the devices of a job have."""
    return not cluster.is_cuda or torch.accelerator.is_available()


def read_node_memory() -> float:
    """Return the bytes that the processes of this machine may use together."""
    total, container = psutil.virtual_memory().total, read_container_memory()
    return float(min(total, container.limit) if container else total)
