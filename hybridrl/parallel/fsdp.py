"""Fully sharded data parallelism: torch's FSDP2 over the `dp` axis."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from hybridrl.models.policy import CausalPolicy

SMALL_MODEL_BYTES = 256 << 20
"""Below this a model is gathered in one piece: many small collectives cost more than its memory."""


def is_small(policy: nn.Module) -> bool:
    """Whether the float32 model is small enough to be gathered whole."""
    return sum(p.numel() for p in policy.parameters()) * 4 < SMALL_MODEL_BYTES


def shard(
    policy: CausalPolicy, mesh: DeviceMesh, dtype: torch.dtype, *, offload: bool
) -> CausalPolicy:
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
    }
    if not is_small(policy):
        kinds = set(policy.model._no_split_modules or ())
        for module in list(policy.model.modules()):
            if type(module).__name__ in kinds:
                fully_shard(module, **settings)
    fully_shard(policy, **settings)
    # The weights of the global loss already divide by all ranks' tokens: sum, do not average.
    # (gloo has no scaled sum, so the factor 1 is undone in `TrainEngine` for both back ends.)
    return policy
