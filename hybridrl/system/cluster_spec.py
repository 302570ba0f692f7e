"""The hardware of a job: devices, the nodes they are in and the links between them, as plain data
for placements, plans and people."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

from hybridrl.errors import ConfigError
from hybridrl.system.container_limits import count_usable_cores

DEFAULT_CPU_SLOTS = 2
MAX_DEVICES = 10_000
"""That a cluster is made of by a name, a file or a question: more of them is a slip of the finger,
and would only take all memory here."""


@dataclass(frozen=True)
class DeviceSlot:
    """A device that a worker host is bound to: one accelerator, or one CPU slot.

    Attributes:
        kind: `cpu` or `cuda`.
        node: The host that it is in.
        index: Its number there.
        model: What it is, a name in `ClusterSpec.models`; empty where nobody has said.
    """

    kind: str
    node: str
    index: int
    model: str = ""


@dataclass(frozen=True)
class DeviceSpec:
    """The memory and speed of devices of one model.

    Attributes:
        memory: Bytes of it that a job may use.
        flops: Operations per second in dense matrix products, by precision (`float32`, `bfloat16`,
            `int8`); empty where nobody knows.
        bandwidth: Of its memory, bytes per second.
        small_op: Seconds of an operation on a handful of numbers, dispatched from Python.
        measured: Whether a probe has seen these rates; makers' figures are never reached.
        few_rows: Operations per second in float32 products of few rows, as in generation; 0 where
            nobody knows.
        date: When they were measured, seconds since the epoch; 0 where nobody knows.
        host_link: Bytes per second between it and its host's memory, in one direction.
    """

    memory: float
    flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float = 0.0
    small_op: float = 1e-5
    measured: bool = False
    few_rows: float = 0.0
    date: float = 0.0
    host_link: float = 20e9


@dataclass(frozen=True)
class LinkSpec:
    """A network or bus link.

    Attributes:
        bandwidth: Bytes per second in one direction.
        latency: Seconds until the first byte is there.
    """

    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True)
class NodeSpec:
    """A node: the links inside it, to other nodes and to checkpoint storage.

    Attributes:
        inside: From each of its devices to another one of it.
        network: Each device's share of its way to other hosts.
        store: To where checkpoints are kept; None: nobody has said.
    """

    inside: LinkSpec
    network: LinkSpec
    store: LinkSpec | None = None


@dataclass(frozen=True)
class ClusterSpec:
    """The devices of a job, node by node, with the specs of their models and links.

    Attributes:
        devices: By their numbers.
        models: What is known of them, by the name of a device's model.
        hosts: By name; empty where nobody has looked at links.
    """

    devices: Sequence[DeviceSlot]
    models: Mapping[str, DeviceSpec] = field(default_factory=dict)
    hosts: Mapping[str, NodeSpec] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The kind of all devices, `cpu` or `cuda`."""
        return self.devices[0].kind

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def devices_per_node(self) -> int:
        """The number of devices of the first node."""
        return sum(device.node == self.devices[0].node for device in self.devices)

    @cached_property
    def memory(self) -> float:
        """The bytes that a job may use on the device with the least memory."""
        return min(self.models[model].memory for model in self.model_names)

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes, each once, in the order of devices."""
        return self.nodes_of(range(len(self.devices)))

    @property
    def model_names(self) -> list[str]:
        """The models of the devices, each once, in the order of devices."""
        return list(dict.fromkeys(device.model for device in self.devices))

    @property
    def rates_known(self) -> bool:
        """True if the speed of every device and link is known."""
        models = all(
            model in self.models and self.models[model].flops for model in self.model_names
        )
        return models and all(device.node in self.hosts for device in self.devices)

    def __str__(self) -> str:
        counts = Counter(device.model for device in self.devices)
        return ", ".join(f"{count} x {model or self.kind}" for model, count in counts.items())

    def memory_of(self, device: int) -> float:
        """Return the bytes of a device that a job may use."""
        return self.models[self.devices[device].model].memory

    def nodes_of(self, devices: Iterable[int]) -> list[str]:
        """Return the names of the nodes of these devices, each once."""
        return list(dict.fromkeys(self.devices[device].node for device in devices))

    def take(self, devices: Sequence[int]) -> ClusterSpec:
        """Return the cluster of these devices only."""
        return ClusterSpec([self.devices[d] for d in devices], self.models, self.hosts)

    @classmethod
    def of_one_node(cls, kind: str, number: int, node: str = "localhost") -> ClusterSpec:
        """Build a cluster of `number` devices of one kind in one node."""
        return cls([DeviceSlot(kind, node, index) for index in range(number)])

    def to_json(self) -> str:
        """Format the cluster as JSON for `from_json`. Consecutive devices of one model in a node
        are one entry with a `count`."""
        alike = groupby(self.devices, lambda device: (device.kind, device.node, device.model))
        groups = [
            {"kind": kind, "node": node, "model": model, "count": len(list(devices))}
            for (kind, node, model), devices in alike
        ]
        models = {name: asdict(model) for name, model in self.models.items()}
        hosts = {name: asdict(host) for name, host in self.hosts.items()}
        return json.dumps({"devices": groups, "models": models, "hosts": hosts}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> ClusterSpec:
        """Parse a cluster from the JSON of `to_json`, or JSON that a person wrote in that form.

        Raises:
            ConfigError: if it is no cluster.
        """
        try:
            read = json.loads(text)
            models = {name: _model(one) for name, one in read["models"].items()}
            hosts = {name: _host(one) for name, one in read.get("hosts", {}).items()}
            devices: list[DeviceSlot] = []
            seen: dict[str, int] = {}
            for group in read["devices"]:
                _refuse_others(group, ("kind", "node", "model", "count"))
                node, model = str(group["node"]), str(group["model"])
                if model not in models:
                    raise ValueError(f"`models` says nothing of {model!r}")
                if group["kind"] not in ("cpu", "cuda"):
                    raise ValueError(f"kind={group['kind']!r} must be `cpu` or `cuda`")
                count = group.get("count", 1)
                if type(count) is not int or not 1 <= count <= MAX_DEVICES - len(devices):
                    raise ValueError(
                        f"count={count!r} must be a whole number, 1 or more; there may be up to "
                        f"{MAX_DEVICES:,} devices"
                    )
                for _ in range(count):
                    index = seen[node] = seen.get(node, -1) + 1
                    devices.append(DeviceSlot(group["kind"], node, index, model))
            if not devices or len({device.kind for device in devices}) > 1:
                raise ValueError("it must have devices, all of one kind")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"This is no cluster: {what}. Expected "
                '{"devices": [{"kind": "cuda", "node": "a", "model": "mine", "count": 8}], '
                '"models": {"mine": {"memory": 8e10, ...}}, "hosts": {...}}, as `hybridrl cluster '
                "probe --json` prints it."
            ) from error
        return cls(devices, models, hosts)


_T = TypeVar("_T")


def _read(kind: type[_T], read: Mapping[str, Any]) -> _T:
    """Parse a dataclass whose fields are numbers from a mapping."""
    known = fields(kind)  # type: ignore[arg-type]
    _refuse_others(read, [one.name for one in known])
    for one in known:
        if one.default is MISSING and one.default_factory is MISSING:
            read[one.name]  # a KeyError names what is missing
    for name, value in read.items():
        if name == "measured":
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r} must be true or false")
            continue
        for number in value.values() if name == "flops" else [value]:
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not is_number or not 0 <= number < math.inf:
                raise ValueError(f"{name}={number!r} must be a number, 0 or more")
    return kind(**read)


def _refuse_others(read: Mapping[str, Any], known: Sequence[str]) -> None:
    if more := read.keys() - set(known):
        raise ValueError(f"there is no `{min(more)}`; there are {', '.join(sorted(known))}")


def _model(read: Mapping[str, Any]) -> DeviceSpec:
    found = _read(DeviceSpec, read)
    if not found.memory or not all(found.flops.values()):
        raise ValueError("`memory` and `flops` must be above 0")
    if found.flops and not found.bandwidth:
        raise ValueError("where there are `flops` there must be a `bandwidth` above 0")
    return found


def _link(read: Mapping[str, Any]) -> LinkSpec:
    found = _read(LinkSpec, read)
    if not found.bandwidth:
        raise ValueError("the `bandwidth` of a link must be above 0")
    return found


def _host(read: Mapping[str, Any]) -> NodeSpec:
    _refuse_others(read, [one.name for one in fields(NodeSpec)])
    store = read.get("store")
    return NodeSpec(
        _link(read["inside"]), _link(read["network"]), None if store is None else _link(store)
    )


def resolve_devices(devices: str, number: int | None, gpus: int, cpus: int) -> tuple[str, int]:
    """Return the kind and the number of devices that a job gets.

    Args:
        devices: `cpu`, `cuda`, or `auto` (GPUs if there are any).
        number: How many; None: every GPU, or two CPU slots.
        gpus, cpus: What there is.

    Raises:
        ConfigError: if there are fewer than asked for.
    """
    kind = devices if devices != "auto" else ("cuda" if gpus else "cpu")
    there = gpus if kind == "cuda" else cpus
    all_of_them = gpus if kind == "cuda" else min(DEFAULT_CPU_SLOTS, cpus)
    wanted = all_of_them if number is None else number
    if not there:
        raise ConfigError("devices=cuda: no GPU was found. Set devices=cpu or devices=auto.")
    if not 1 <= wanted <= there:
        what = "GPUs" if kind == "cuda" else "CPU cores"
        raise ConfigError(
            f"num_devices={wanted}: there are {there} {what}. Set num_devices={there} or fewer"
            + (", or join a larger Ray cluster with ray.address=..." if wanted > there else ".")
        )
    return kind, wanted


def find_local_cluster(devices: str, number: int | None) -> ClusterSpec:
    """Return the devices of this machine that a job gets; see `resolve_devices`.

    Raises:
        ConfigError: if there are fewer than asked for.
    """
    import torch  # which takes a second, and a cluster may be read from a file

    gpus = torch.accelerator.device_count()
    return ClusterSpec.of_one_node(*resolve_devices(devices, number, gpus, count_usable_cores()))
