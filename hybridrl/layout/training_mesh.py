"""The mesh on which a model is trained, from its parallel sizes and those of generation."""

from __future__ import annotations

import math

from hybridrl.config.schema import ParallelConfig
from hybridrl.errors import ConfigError
from hybridrl.layout.rank_mesh import RankMesh

DATA_AXES = ("dp", "ring", "ulysses")
"""Axes over which tokens are split: the ranks of one place on the other axes hold the same
parameters, or share them."""


def build_training_mesh(devices: int, parallel: ParallelConfig, rollout_tp: int = 1) -> RankMesh:
    """Build the mesh (dp, ring, ulysses, pp, tp) of a model over `devices` ranks.

    What a rank trains is part of what it generates with, as in the 3D-HybridEngine of HybridFlow
    (Sheng et al., EuroSys 2025, section 5). A generation replica is `rollout_tp` consecutive ranks,
    as vLLM wants them; so that the shards nest, tensor ranks of one generation shard stand in
    different replicas of generation. (The paper numbers training consecutively and generation with
    strides: the same groups under other numbers.) Where generation cuts finer than training
    (`rollout_tp` is a multiple of `tp`) that cannot be, and ranks are numbered one after the other.

    Raises:
        ConfigError: if the sizes do not fit each other.
    """
    check_parallel_sizes(devices, parallel, rollout_tp)
    model = parallel.pp * parallel.tp
    axes = {
        "dp": devices // (model * parallel.ring * parallel.ulysses),
        "ring": parallel.ring,
        "ulysses": parallel.ulysses,
        "pp": parallel.pp,
        "tp": parallel.tp,
    }
    if rollout_tp > parallel.tp:
        return RankMesh(axes)
    import numpy as np  # `hybridrl whatif --help` needs none of it

    ranks = np.arange(devices).reshape(-1, parallel.tp // rollout_tp, rollout_tp)
    return RankMesh(axes, tuple(ranks.swapaxes(1, 2).flatten().tolist()))


def model_parallel_size(parallel: ParallelConfig) -> int:
    """Return the number of devices that one data-parallel replica of a model is split over."""
    return parallel.ring * parallel.ulysses * parallel.pp * parallel.tp


def check_parallel_sizes(
    devices: int,
    parallel: ParallelConfig,
    rollout_tp: int = 1,
    setting: str = "actor.parallel",
    rollout_setting: str = "rollout.parallel.tp",
) -> None:
    """Check that the parallel sizes fit the number of devices and each other.

    Args:
        setting, rollout_setting: That say how the model is cut, and over how many ranks while it
            generates.
    """
    sizes = {name: getattr(parallel, name) for name in ("ring", "ulysses", "pp", "tp")}
    for name in (*sizes, "chunks", "dp", "shards"):
        size = getattr(parallel, name)
        if size is not None and size < 1:
            raise ConfigError(f"{setting}.{name}={size}: must be at least 1.")
    if rollout_tp < 1:
        raise ConfigError(f"{rollout_setting}={rollout_tp}: must be at least 1.")
    cut = math.prod(sizes.values())
    product = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "tp=1"
    if devices % cut:
        raise ConfigError(
            f"{setting}: {product} takes {cut} devices or a multiple, but there are "
            f"{devices}. Lower one of them, or set num_devices."
        )
    if parallel.dp is not None and parallel.dp * cut != devices:
        raise ConfigError(
            f"{setting}: dp={parallel.dp} x {product} makes {parallel.dp * cut} devices, but "
            f"there are {devices}. Leave {setting}.dp out to use all of them."
        )
    data = devices // (parallel.pp * parallel.tp)
    if parallel.shards is not None and data % parallel.shards:
        raise ConfigError(
            f"{setting}.shards={parallel.shards} does not divide the {data} data- and "
            "sequence-parallel ranks."
        )
    if parallel.gradients != "full" and parallel.shards == 1:
        raise ConfigError(
            f"{setting}.gradients={parallel.gradients} is of the sums over ranks that share "
            f"parameters, and with {setting}.shards=1 none do. Leave one of them out."
        )
    if parallel.weights != "full":
        _check_weight_compression(parallel, setting)
    if devices % rollout_tp:
        raise ConfigError(
            f"{rollout_setting}={rollout_tp} does not divide the {devices} devices. Set it to a "
            "divisor, or set num_devices."
        )
    if parallel.tp % rollout_tp and rollout_tp % parallel.tp:
        raise ConfigError(
            f"{rollout_setting}={rollout_tp} and actor.parallel.tp={parallel.tp}: one must "
            "divide the other, or what a rank trains would not lie inside what it generates with."
        )


def _check_weight_compression(parallel: ParallelConfig, setting: str) -> None:
    """Check that compressed weight gathers are used only where FSDP alone gathers weights."""
    said = f"{setting}.weights={parallel.weights}"
    if parallel.shards == 1:
        raise ConfigError(
            f"{said} is of weights that ranks share, and with {setting}.shards=1 none are. Leave "
            "one of them out."
        )
    for name in ("tp", "pp"):
        if (size := getattr(parallel, name)) > 1:
            raise ConfigError(
                f"{said} does not go with {setting}.{name}={size}, for it is made for models that "
                f"are cut by data and sequences only. Set {setting}.{name}=1, or "
                f"{setting}.weights=full."
            )
