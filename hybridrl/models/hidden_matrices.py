"""The matrices of a model's layers, which Muon steps."""

from __future__ import annotations

from torch import nn

from hybridrl.models.expert_routing import find_routers

_ROUTER_NAMES = ("gate", "router", "shared_expert_gate")
"""Of routers that transformers does not name."""


def list_hidden_matrices(model: nn.Module) -> set[str]:
    """Return the names of the matrices of a model's layers: parameters with two dims, or of experts
    with three, that are neither a table of vectors nor a router's.

    Args:
        model: A transformers model, cut and sharded or not.
    """
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    layers, others = [], [f"{name}." for name in find_routers(model)]  # type: ignore[arg-type]
    for name, module in model.named_modules():
        # FSDP puts its own name before that of a class.
        if type(module).__name__.removeprefix("FSDP") in kinds:
            layers.append(f"{name}.")
        elif isinstance(module, nn.Embedding) or name.rpartition(".")[2] in _ROUTER_NAMES:
            others.append(f"{name}.")
    inside, outside = tuple(layers), tuple(others)
    return {
        name
        for name, p in model.named_parameters()
        if (p.ndim == 2 or (p.ndim == 3 and ".experts." in name))
        and name.startswith(inside)
        and not name.startswith(outside)
        and ".lora_embedding_" not in name
    }
