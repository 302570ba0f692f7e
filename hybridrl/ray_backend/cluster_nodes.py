"""The nodes of a cluster: what each has to give, and whether it fits the job. Knows no Ray."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridrl.errors import ConfigError


@dataclass(frozen=True)
class RayNode:
    """A machine of the cluster.

    Attributes:
        id: Ray's name for it: two nodes of a test may share an address.
        port: Where its Ray process listens.
        cpus, gpus: All that it has.
        free_cpus, free_gpus: What no job has taken.
    """

    id: str
    address: str
    port: int = 0
    cpus: float = 0.0
    gpus: float = 0.0
    free_cpus: float = 0.0
    free_gpus: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.address}: {self.free_gpus:g} of {self.gpus:g} GPUs and "
            f"{self.free_cpus:g} of {self.cpus:g} CPUs free"
        )

    def slots(self, kind: str, cpus_per_host: float, free: bool = False) -> int:
        """Return how many devices of a kind the node can hold: beside what runs there, or (not
        `free`) when idle."""
        cpus, gpus = (self.free_cpus, self.free_gpus) if free else (self.cpus, self.gpus)
        by_cpu = int(cpus / cpus_per_host + 1e-6)
        return min(by_cpu, int(gpus)) if kind == "cuda" else by_cpu


NodeReport = tuple[Mapping[str, str], Sequence[str]]
"""A node's answer to `node_probe.probe_node`: the versions of Python and of packages, "" for what
is not installed; and the settings whose paths do not exist there."""


def make_node_sort_key(node_id: str, address: str) -> tuple[int, int, str]:
    """Return a sort key: 10.0.0.9 before 10.0.0.10; nodes of one address by their ids."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return (0, 0, f"{address} {node_id}")
    return (number.version, int(number), node_id)


def format_node_table(nodes: Sequence[RayNode]) -> str:
    """Format the nodes, one line each."""
    ordered = sorted(nodes, key=lambda node: make_node_sort_key(node.id, node.address))
    return "\n".join(f"  {node}" for node in ordered)


def check_capacity(nodes: Sequence[RayNode], kind: str, devices: int, cpus_per_host: float) -> None:
    """Refuse a cluster that could not hold so many devices even if it were idle.

    Raises:
        ConfigError: with what each node has.
    """
    room = sum(node.slots(kind, cpus_per_host) for node in nodes)
    if room < devices:
        each = f"1 GPU and {cpus_per_host:g} CPUs" if kind == "cuda" else f"{cpus_per_host:g} CPUs"
        raise ConfigError(
            f"num_devices={devices}: a device of kind `{kind}` takes {each} of one node, and there "
            f"is room for {room}. Set num_devices={room} or fewer, or add nodes. The nodes:\n"
            f"{format_node_table(nodes)}"
        )


def check_node_reports(
    here: Mapping[str, str], reports: Mapping[str, NodeReport], paths: Mapping[str, str]
) -> None:
    """Refuse nodes that have other versions than the driver, or do not see the job's files.

    Args:
        here: The driver's versions.
        reports: Of the nodes, by their addresses.
        paths: What every node has to see, by setting.

    Raises:
        ConfigError: naming every such node and what is wrong there.
    """
    other = {
        address: _find_version_differences(here, there) for address, (there, _) in reports.items()
    }
    if lines := [f"  {node} {', '.join(found)}" for node, found in other.items() if found]:
        raise ConfigError(
            "The driver and all nodes must have the same versions, in the Python that runs Ray "
            "there: install on these nodes what the driver has, or run all from one image.\n"
            + "\n".join(lines)
        )
    blind: dict[str, list[str]] = {}
    for address, (_, unseen) in reports.items():
        for setting in unseen:
            blind.setdefault(setting, []).append(address)
    if blind:
        lines = [
            f"  {setting}={paths[setting]} is not on {', '.join(nodes)}"
            for setting, nodes in blind.items()
        ]
        raise ConfigError(
            "All nodes must see the run's folder and its files. Put them on a file system that "
            "every node has mounted at the same place.\n" + "\n".join(lines)
        )


def check_access(errors: Mapping[str, Mapping[str, str]], folders: Mapping[str, str]) -> None:
    """Refuse nodes whose processes cannot use the folders of the job.

    Args:
        errors: By node, why not, by setting.
        folders: Paths and URLs, by setting.

    Raises:
        ConfigError: naming every such node, the setting and the error.
    """
    lines = [
        f"  {setting}={folders[setting]} on {node}: {why}"
        for node, found in errors.items()
        for setting, why in found.items()
    ]
    if lines:
        raise ConfigError(
            "Workers cannot write or read there. They have the environment of `ray start` on their "
            "node, not the driver's: set credentials and addresses (AWS_ACCESS_KEY_ID, "
            "AWS_ENDPOINT_URL, ...) before it on every node, or put them where each node finds "
            "them (~/.aws, a role of the machine).\n" + "\n".join(lines)
        )


def _find_version_differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    found = []
    for package, version in here.items():
        theirs = there.get(package, "")
        if version and not theirs:
            found.append(f"has no {package} (the driver: {version})")
        elif version and theirs != version:
            found.append(f"has {package} {theirs} (the driver: {version})")
    return found
