"""Fully sharded data parallelism: torch's FSDP2 over the ranks that have different tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard

from hybridrl.models.packed_models import PackedModel
from hybridrl.parallel.compressed_collectives import DifferenceAllGather
from hybridrl.parallel.gradient_reduction import GradientReduceScatter
from hybridrl.parallel.measured_reduction import MeasuredReduceScatter
from hybridrl.system.device_traits import SMALL_MODEL_BYTES


def is_small_model(model: nn.Module) -> bool:
    """Return whether the float32 model is small enough to be gathered as one unit."""
    return sum(p.numel() for p in model.parameters()) * 4 < SMALL_MODEL_BYTES


def apply_fsdp(
    model: PackedModel,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    offload: bool,
    reduce_scatter: GradientReduceScatter | None = None,
    reduce_dtype: torch.dtype = torch.float32,
) -> PackedModel:
    """Shard the parameters over `mesh`, in place. Gradients are summed over it and not
    averaged: the weights of the global loss already divide by the tokens of all ranks.

    Each transformer layer is a unit that is gathered for its own computation and freed after it,
    and so are embedding and head, unless they are tied: then they stay gathered from the first use
    to the last, with what else is left (the final norm). A small model is a single unit.

    Args:
        dtype: Precision of computation.
        offload: Keep the shards, their gradients and the optimizer state in CPU memory.
        reduce_scatter: Sums gradients over the last axis of `mesh`; None: torch's own, in full.
            One that measures does so here, which is collective.
        reduce_dtype: Precision in which torch's own sums gradients. The sum is added to those of
            other micro-batches in the precision of the parameters.
    """
    settings = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        "shard_placement_fn": partial(_dim_to_cut, shards=mesh.size(mesh.ndim - 1)),
    }
    if not is_small_model(model):
        kinds = set(model.inner._no_split_modules or ())
        for module in list(model.inner.modules()):
            if type(module).__name__ in kinds:
                fully_shard(module, **settings)
        _shard_ends(model, settings)
    fully_shard(model, **settings)
    if mesh.size() > 1:
        for unit in list_fsdp_units(model):
            unit.set_gradient_divide_factor(1.0)
            # gloo has no sum of multiples, which is what a factor means to it otherwise.
            unit.set_force_sum_reduction_for_comms(True)
        if isinstance(reduce_scatter, MeasuredReduceScatter):
            _install(reduce_scatter, model)
        elif reduce_scatter is not None:
            for unit in list_fsdp_units(model):
                unit.set_custom_reduce_scatter(reduce_scatter)
    return model


def list_fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """Return the FSDP units of a model: the modules whose parameters are gathered together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def apply_difference_gathers(model: nn.Module) -> list[DifferenceAllGather]:
    """Make each FSDP unit gather its weights as differences, and return the gathers."""
    gathers = []
    for unit in list_fsdp_units(model):
        gathers.append(DifferenceAllGather())
        unit.set_custom_all_gather(gathers[-1])
    return gathers


def list_unit_parameters(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the trained parameters of each FSDP unit, inner units first."""
    seen: set[nn.Parameter] = set()
    found = []
    for unit in reversed(list_fsdp_units(model)):
        own = [p for p in unit.parameters() if p.requires_grad and p not in seen]
        seen.update(own)
        found.append(own)
    return found


def _install(sums: MeasuredReduceScatter, model: nn.Module) -> None:
    """Give every unit with trained parameters its own reduce-scatter."""
    trained = {
        unit: sum(parameter.numel() for parameter in own)
        for unit, own in zip(
            reversed(list_fsdp_units(model)), list_unit_parameters(model), strict=True
        )
        if own
    }
    sums.install(list(trained), list(trained.values()))


def _shard_ends(model: PackedModel, settings: dict[str, Any]) -> None:
    """Shard embedding and head, as far as this rank has them."""
    embedding, head = model.inner.get_input_embeddings(), model.head
    ends = [end for end in (embedding, head) if any(True for _ in end.parameters())]
    if len(ends) == 2 and embedding.weight is next(head.parameters()):
        return
    for end in ends:
        # The head's backward comes right after its forward.
        fully_shard(end, reshard_after_forward=end is not head, **settings)
    if head in ends and hasattr(head, "log_probs"):
        register_fsdp_forward_method(head, "log_probs")


def _dim_to_cut(parameter: nn.Parameter, shards: int) -> Shard:
    """Return the shard placement of a parameter: the first dim that gives every rank a part. Dim 0
    of a layer's experts is their number, which may be smaller than the number of ranks; FSDP cuts
    other dims only into equal parts. If none divides, return dim 0, and some ranks hold nothing."""
    sizes = enumerate(parameter.shape)
    if not parameter.ndim or parameter.shape[0] >= shards:
        return Shard(0)
    return Shard(next((dim for dim, size in sizes if size % shards == 0), 0))
