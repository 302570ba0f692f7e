"""The rates that a plan computes with: one decision where they are from, for all that predict."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.models.model_loading import load_model_config
from hybridrl.planner.computation_dtype import resolve_dtype
from hybridrl.planner.machine.cluster_probe import probe_cluster
from hybridrl.planner.machine.device_catalog import ACCELERATORS, add_device_memory
from hybridrl.planner.machine.device_probe import mean_of_all
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.machine.layer_probe import LayerRuns, measure_layers
from hybridrl.planner.machine.measurements import (
    CLUSTER,
    LAYERS,
    begin_measurement,
    describe_devices,
    find_measurement,
    keep_measurement,
)
from hybridrl.planner.step.operator_work import CostPredictor
from hybridrl.planner.step.step_calls import SampleLengths, compute_step_sizes
from hybridrl.system.cluster_spec import ClusterSpec

MeasureLayers = Callable[[LayerRuns], dict[str, float]]

COST_SOURCES: list[Callable[[ClusterSpec, str], CostPredictor | None]] = []
"""Asked for what pieces of work take on the devices of a cluster in a precision, where that was
measured; `systems.operator_costs` is one."""

NOT_ARCHITECTURE = ("_name_or_path", "transformers_version", "architectures", "dtype")


def resolve_rates(
    config: Config,
    cluster: ClusterSpec,
    lengths: SampleLengths | None = None,
    measure: MeasureLayers | None = None,
    *,
    makers_first: bool = False,
) -> list[DeviceRates]:
    """Return the rates of each device, from the first of these that there is: what the cluster says
    of its devices and links; the work that `hybridrl calibrate` has measured here; layers of the
    job's model, measured here lately; and else layers that are measured now, and kept for all that
    is predicted later.

    Args:
        config: With the model's folder.
        lengths: Of its samples; None: the longest that are allowed.
        measure: How layers are measured if not by processes of this one's own.
        makers_first: Take makers' figures of known accelerators, rather than measure now.

    Raises:
        ConfigError: for devices that are not known, and are not here to be measured.
    """
    dtype = resolve_dtype(config, cluster.kind).model.dtype
    if cluster.rates_known:
        return DeviceRates.known(cluster, dtype)
    here = add_device_memory(cluster)
    for find_costs in COST_SOURCES:
        if (costs := find_costs(here, dtype)) is not None:
            return DeviceRates.known(resolve_cluster_rates(here), dtype, costs)
    sizes = compute_step_sizes(config, lengths)
    path, devices = str(config.model.path), len(here.devices)
    tokens = min(config.actor.tokens_per_microbatch or sizes.tokens, sizes.tokens // devices + 1)
    runs = LayerRuns.of_job(path, dtype, tokens, sizes.sample_tokens)
    about = {**describe_devices(here), **runs._asdict(), "path": _architecture(path)}
    if (kept := find_measurement(LAYERS, about)) is None:
        if makers_first and (known := apply_vendor_rates(here)) is not None:
            return DeviceRates.known(known, dtype)
        kept = begin_measurement(LAYERS, about)
        found = _measure_here(here, runs) if measure is None else measure(runs)
        kept = replace(kept, data=found)
        keep_measurement(kept)
    source = f"a probe of {devices} device(s) with layers of this model, {kept}"
    return [DeviceRates(**kept.data, source=source)] * devices


def resolve_cluster_rates(cluster: ClusterSpec) -> ClusterSpec:
    """Return a job's devices with all that is known of them without a model: of accelerators what
    their makers say, else what a probe of this machine has found, now or earlier."""
    here = add_device_memory(cluster)
    if (known := apply_vendor_rates(here)) is not None:
        return known
    kept = find_measurement(CLUSTER, describe_devices(here))
    found = None
    if kept is not None:
        with contextlib.suppress(ConfigError):
            found = ClusterSpec.from_json(json.dumps(kept.data))
    if found is None or found.model_names != here.model_names:
        with tempfile.TemporaryDirectory() as folder:
            found = measure_cluster(
                ClusterSpec.of_one_node(here.kind, here.devices_per_node), Path(folder)
            )[0]
    host = found.hosts[found.nodes[0]]
    return replace(here, models=found.models, hosts=dict.fromkeys(here.nodes, host))


def measure_cluster(cluster: ClusterSpec, folder: Path) -> tuple[ClusterSpec, Path | None]:
    """Probe this machine and keep what was found; return it, and the file that has it.

    Args:
        folder: Where the store is measured.
    """
    measurement = begin_measurement(CLUSTER, describe_devices(cluster))
    found = probe_cluster(cluster, folder)
    return found, keep_measurement(replace(measurement, data=json.loads(found.to_json())))


def apply_vendor_rates(here: ClusterSpec) -> ClusterSpec | None:
    """Return a job's devices with what their makers say; None where some are not known."""
    if not here.is_cuda:
        return None
    found = {name: _known_as(name, here.models[name].memory) for name in here.model_names}
    if None in found.values():
        return None
    known = {name: ACCELERATORS[maker] for name, maker in found.items() if maker is not None}
    models = {
        name: replace(model, memory=here.models[name].memory) for name, (model, _) in known.items()
    }
    hosts = {device.node: known[device.model][1] for device in here.devices}
    return replace(here, models=models, hosts=hosts)


def _known_as(name: str, memory: float) -> str | None:
    """Return the key of `ACCELERATORS` for a driver's device name such as `NVIDIA A100-SXM4-80GB`;
    None for other builds, such as PCIe ones, which are slower."""
    words = re.split(r"[^A-Z0-9]+", name.upper().replace("RTX ", "RTX"))
    if "PCIE" in words:
        return None
    found = [known for known in ACCELERATORS if known.split("-")[0].upper() in words]
    return min(found, key=lambda known: abs(ACCELERATORS[known][0].memory - memory), default=None)


def _measure_here(cluster: ClusterSpec, runs: LayerRuns) -> dict[str, float]:
    if cluster.is_cuda and not torch.accelerator.is_available():
        raise ConfigError(
            f"The job has {cluster.kind} devices that nobody knows and that are not here to be "
            "measured. Name them: --devices 8xH100; or, of a run, write their `models` into its "
            "cluster.json, as `hybridrl cluster probe --json` prints them there."
        )
    return mean_of_all(measure_layers, cluster, runs)


def _architecture(path: str) -> str:
    """Return a hash of what tells models apart whose layers take other time."""
    config: dict[str, Any] = load_model_config(path).to_dict()
    text = {name: value for name, value in config.items() if name not in NOT_ARCHITECTURE}
    written = json.dumps(text, sort_keys=True, default=str)
    return hashlib.sha256(written.encode()).hexdigest()[:16]
