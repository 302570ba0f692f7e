"""Where each rank stands while a model is trained, given how it is cut and how it generates."""

from __future__ import annotations

import math

import numpy as np

from hybridrl.config.schema import ParallelConfig
from hybridrl.core.mesh import Mesh
from hybridrl.errors import ConfigError

DATA = ("dp", "ring", "ulysses")
"""Axes over which tokens are split: the ranks of one place on the other axes hold the same
parameters, or share them."""


def training_mesh(devices: int, parallel: ParallelConfig, rollout_tp: int = 1) -> Mesh:
    """The mesh (dp, ring, ulysses, pp, tp) of a model over `devices` ranks.

    Generation wants the `rollout_tp` ranks that share a copy to be consecutive. So the ranks of a
    tensor-parallel group stand `tp / rollout_tp` apart on it: then what a rank trains is part of
    what it generates with, and going from one to the other moves only what is missing
    (HybridFlow's 3D-HybridEngine, EuroSys'25, section 5.3, with the roles of the meshes swapped).

    Raises:
        ConfigError: if the sizes do not fit each other.
    """
    check_sizes(devices, parallel, rollout_tp)
    model = parallel.pp * parallel.tp
    axes = {
        "dp": devices // (model * parallel.ring * parallel.ulysses),
        "ring": parallel.ring,
        "ulysses": parallel.ulysses,
        "pp": parallel.pp,
        "tp": parallel.tp,
    }
    outer = math.gcd(parallel.tp, rollout_tp)
    grid = np.arange(devices).reshape(-1, parallel.pp, parallel.tp // outer, outer)
    ranks = tuple(grid.swapaxes(2, 3).ravel().tolist())
    return Mesh(axes, None if ranks == tuple(range(devices)) else ranks)


def check_sizes(devices: int, parallel: ParallelConfig, rollout_tp: int) -> None:
    """Refuses products that do not fit the devices, or each other."""
    sizes = {name: getattr(parallel, name) for name in ("ring", "ulysses", "pp", "tp")}
    for name, size in {**sizes, "dp": parallel.dp, "shards": parallel.shards}.items():
        if size is not None and size < 1:
            raise ConfigError(f"actor.parallel.{name}={size}: must be at least 1.")
    if rollout_tp < 1:
        raise ConfigError(f"rollout.parallel.tp={rollout_tp}: must be at least 1.")
    cut = math.prod(sizes.values())
    product = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "tp=1"
    if devices % cut:
        raise ConfigError(
            f"actor.parallel: {product} takes {cut} devices or a multiple, but there are "
            f"{devices}. Lower one of them, or set num_devices."
        )
    if parallel.dp is not None and parallel.dp * cut != devices:
        raise ConfigError(
            f"actor.parallel: dp={parallel.dp} x {product} makes {parallel.dp * cut} devices, but "
            f"there are {devices}. Leave actor.parallel.dp out to use all of them."
        )
    data = devices // (parallel.pp * parallel.tp)
    if parallel.shards is not None and data % parallel.shards:
        raise ConfigError(
            f"actor.parallel.shards={parallel.shards} does not divide the {data} data- and "
            "sequence-parallel ranks."
        )
    if devices % rollout_tp:
        raise ConfigError(
            f"rollout.parallel.tp={rollout_tp} does not divide the {devices} devices. Set it to a "
            "divisor, or set num_devices."
        )
    if parallel.tp % rollout_tp and rollout_tp % parallel.tp:
        raise ConfigError(
            f"rollout.parallel.tp={rollout_tp} and actor.parallel.tp={parallel.tp}: one must "
            "divide the other, or what a rank trains would not lie inside what it generates with."
        )
