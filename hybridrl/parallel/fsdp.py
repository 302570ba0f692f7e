"""Fully sharded data parallelism: torch's FSDP2 over the ranks that have different tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from hybridrl.models import PackedModel

SMALL_MODEL_BYTES = 256 << 20
"""Below this a model is gathered in one piece: many small collectives cost more than its memory."""


def is_small(model: nn.Module) -> bool:
    """Whether the float32 model is small enough to be gathered whole."""
    return sum(p.numel() for p in model.parameters()) * 4 < SMALL_MODEL_BYTES


def shard(
    model: PackedModel, mesh: DeviceMesh, dtype: torch.dtype, *, offload: bool
) -> PackedModel:
    """Shards the float32 parameters over `mesh`, in place.

    Each transformer layer is a unit that is gathered for its own computation and freed after it;
    what is left (embeddings, final norm) is one more. A small model is a single unit.

    Args:
        dtype: Precision of computation; gradients are reduced in float32.
        offload: Keep the shards, their gradients and the optimizer state in CPU memory.
    """
    settings = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        "shard_placement_fn": partial(_dim_to_cut, shards=mesh.size(mesh.ndim - 1)),
    }
    if not is_small(model):
        kinds = set(model.inner._no_split_modules or ())
        for module in list(model.inner.modules()):
            if type(module).__name__ in kinds:
                fully_shard(module, **settings)
    fully_shard(model, **settings)
    # The weights of the global loss already divide by all ranks' tokens: sum, do not average.
    # (gloo has no scaled sum: for both back ends `TrainEngine` multiplies the loss by the ranks.)
    return model


def _dim_to_cut(parameter: nn.Parameter, shards: int) -> Shard:
    """The first dim that gives every rank a part; of a layer's experts dim 0 is their number, which
    may be less. Other dims FSDP cuts in equal parts only: if none can be, dim 0, and some ranks
    have nothing."""
    sizes = enumerate(parameter.shape)
    if not parameter.ndim or parameter.shape[0] >= shards:
        return Shard(0)
    return Shard(next((dim for dim, size in sizes if size % shards == 0), 0))
