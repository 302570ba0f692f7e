"""What a job's own devices do in a second, measured by its hosts before it places its roles: with
their threads, all at once, over the network that is between them."""

from __future__ import annotations

import math

import torch

from hybridrl.controller import ONE_TO_ALL, Worker, WorkerGroup, transfer
from hybridrl.controller.executor import Executor
from hybridrl.parallel.process_group import join_group_world
from hybridrl.planner.machine.device_probe import collectives
from hybridrl.planner.machine.layer_probe import LayerRuns, measure_layers
from hybridrl.system.cluster_spec import ClusterSpec

_PROBE_ROLE = "probe"
_MESSAGE_BYTES = 8 << 20
"""Bytes that devices of a node, or all devices, gather."""


class ProbeWorker(Worker):
    """A rank of what is measured; see `layer_probe`."""

    @transfer(ONE_TO_ALL)
    def measure(self, runs: LayerRuns) -> dict[str, float]:
        """Measure layers of a model, and a gather of one of them."""
        join_group_world(self.context)
        place = (self.context.rank, self.context.world_size, self.context.device_kind)
        return measure_layers(*place, torch.get_num_threads(), runs)

    @transfer(ONE_TO_ALL)
    def measure_link(self) -> dict[str, float]:
        """Measure a gather of `_MESSAGE_BYTES` bytes."""
        device = join_group_world(self.context)
        return collectives(device, self.context.world_size, _MESSAGE_BYTES)


def probe_job_devices(executor: Executor, runs: LayerRuns) -> dict[str, float]:
    """Measure layers as `layer_probe.measure_layers` does, on the job's own hosts.

    Raises:
        WorkerError: if a host fails.
    """
    cluster = executor.cluster
    group = WorkerGroup(executor, _PROBE_ROLE, ProbeWorker, range(len(cluster.devices)))
    found = group.measure(runs).get()
    mean = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
    if len(cluster.nodes) > 1:
        mean |= _links(executor, cluster, mean["network"])
    return mean


def _links(executor: Executor, cluster: ClusterSpec, all_devices: float) -> dict[str, float]:
    """Measure the link of one device to others of its node, and derive its share of the network: a
    ring over all devices has the share of every device of a node."""
    node = cluster.devices[0].node
    near = [number for number, device in enumerate(cluster.devices) if device.node == node]
    link = math.inf
    if len(near) > 1:
        group = WorkerGroup(executor, f"{_PROBE_ROLE} of a node", ProbeWorker, near)
        link = min(one["link"] for one in group.measure_link().get())
    return {"link": link, "network": all_devices / len(near)}
