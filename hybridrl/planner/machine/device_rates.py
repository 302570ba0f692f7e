"""Rates of a device, as makers say, as a probe has found, or as work was measured."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, fields

from hybridrl.errors import ConfigError
from hybridrl.planner.step.operator_work import CostPredictor
from hybridrl.system.cluster_spec import ClusterSpec, DeviceSpec, NodeSpec
from hybridrl.system.formatting import format_seconds

_COMPUTE_SHARE, _BANDWIDTH_SHARE, _LINK_SHARE = 0.45, 0.7, 0.7
"""Of what the makers promise, the shares that training reaches in matrix products, and memory and
links in streaming; for machines that cannot be probed."""
_LAUNCH_SMALL_OPS = {"cpu": 15, "cuda": 200}
"""A layer's kernels are launched in so many small operations; a backward takes twice as many. On
GPUs as seen on an H100, in micro-batches of 4,096 and of 16,384 tokens."""
_LOWER_IS_FASTER = (
    "forward_overhead",
    "training_overhead",
    "sums",
    "small_op",
    "hop",
    "network_hop",
)
"""Of the rates, those of which less is quicker."""


@dataclass(frozen=True)
class DeviceRates:
    """The rates of one device while all devices work.

    Attributes:
        forward, training: Floating-point operations in a layer's forward, or forward and backward.
        forward_overhead, training_overhead: Seconds of a layer that do not grow with its tokens.
        memory: Bytes of memory, read or written.
        link, network: Bytes from other devices of its node, and of other nodes, as a layer's
            parameters are gathered.
        sums: Times that a reduce-scatter takes of an all-gather of as much.
        small_op: Seconds of an operation on a handful of numbers, dispatched from Python.
        source: Where this is from.
        hop, network_hop: Seconds from one rank of a collective to the next, in its node or in
            another; 0 where `link` has them in it.
        host_link: Bytes from or to the memory of the host.
        costs: What pieces of work were measured to take, where they were; goes before the rates.
    """

    forward: float
    training: float
    forward_overhead: float
    training_overhead: float
    memory: float
    link: float
    network: float
    sums: float
    small_op: float
    source: str
    hop: float = 0.0
    network_hop: float = 0.0
    host_link: float = 20e9
    costs: CostPredictor | None = None

    @classmethod
    def known(
        cls, cluster: ClusterSpec, dtype: str, costs: CostPredictor | None = None
    ) -> list[DeviceRates]:
        """Return the rates of each device of a cluster whose rates are known.

        Args:
            dtype: Name of the precision of computation.
            costs: Of these devices, if they were measured.

        Raises:
            ConfigError: if nobody knows how fast a device is in this precision.
        """
        precision = "float32" if dtype == "float32" else "bfloat16"
        made: dict[tuple[str, NodeSpec], DeviceRates] = {}
        found = []
        for device in cluster.devices:
            key = device.model, cluster.hosts[device.node]
            if key not in made:
                model = cluster.models[device.model]
                if precision not in model.flops:
                    raise ConfigError(
                        f"model.dtype={dtype}: `flops` of {device.model} says nothing of "
                        f"{precision}, only of {', '.join(model.flops)}. Add it to the cluster's "
                        "file, or choose another model.dtype."
                    )
                made[key] = _known(model, key[1], device.kind, precision, costs)
            found.append(made[key])
        return found

    @classmethod
    def of_slowest(cls, several: Iterable[DeviceRates]) -> DeviceRates:
        """Return the rates of devices that work together: each waits for the slowest of them."""
        found = set(several)
        if len(found) == 1:
            return found.pop()
        rates = {
            one.name: (max if one.name in _LOWER_IS_FASTER else min)(
                getattr(each, one.name) for each in found
            )
            for one in fields(cls)
            if one.name != "costs"
        }
        return cls(**rates)


def _known(
    model: DeviceSpec, host: NodeSpec, kind: str, precision: str, costs: CostPredictor | None
) -> DeviceRates:
    compute, bandwidth, wire, said = _COMPUTE_SHARE, _BANDWIDTH_SHARE, _LINK_SHARE, "known rates"
    if model.measured:
        compute = bandwidth = wire = 1.0
        age = f" {format_seconds(time.time() - model.date)} ago" if model.date else ""
        said = f"rates measured{age}"
    return DeviceRates(
        forward=compute * model.flops[precision],
        training=compute * model.flops[precision],
        forward_overhead=_LAUNCH_SMALL_OPS[kind] * model.small_op,
        training_overhead=3 * _LAUNCH_SMALL_OPS[kind] * model.small_op,
        memory=bandwidth * model.bandwidth,
        link=wire * host.inside.bandwidth,
        network=wire * host.network.bandwidth,
        sums=1.0,
        small_op=model.small_op,
        source=f"{said}, of which {compute:.0%} in products, {bandwidth:.0%} of memory and "
        f"{wire:.0%} of links{f', and {costs.source}' if costs else ''}",
        hop=host.inside.latency,
        network_hop=host.network.latency,
        host_link=model.host_link,
        costs=costs,
    )
