"""Activation checkpointing: what a layer keeps of its forward (`actor.gradient_checkpointing`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from hybridrl.config.schema import CHECKPOINTING_MODES
from hybridrl.system.device_traits import has_pinned_memory

NO_CHECKPOINTING, SELECTIVE_CHECKPOINTING, BLOCK_CHECKPOINTING = CHECKPOINTING_MODES[:3]
FULL_CHECKPOINTING, OFFLOAD_CHECKPOINTING = CHECKPOINTING_MODES[3:]
PRODUCT_OPERATIONS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm")
COUNTED_ATTENTION = "hybridrl::counted_attention"
"""Stands for attention where only memory is counted."""
_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward",
    COUNTED_ATTENTION,
)
KEPT_OPERATIONS = {
    SELECTIVE_CHECKPOINTING: (*PRODUCT_OPERATIONS, *_ATTENTION),
    BLOCK_CHECKPOINTING: _ATTENTION,
}
"""The operations whose results are kept by `actor.gradient_checkpointing`, where it is by operation
that it chooses."""

_EXPERT_OPERATIONS = ("aten::bmm", "aten::_grouped_mm")
"""The products of experts. If experts have biases, transformers adds these to the results in place,
so the results cannot be kept."""


def set_activation_checkpointing(model: PreTrainedModel, kept: str) -> None:
    """Set the part of its forward that every layer keeps for the backward.

    Args:
        kept: `none`: nothing is computed twice, so all is kept; `auto`, which nobody has resolved,
            means it too. `selective`: results of matrix products and attention; the rest, which is
            cheap, is computed again. `block`: results of attention. `full`: its input only.
            `offload`: that too, in the host's memory.
    """
    if kept in ("auto", NO_CHECKPOINTING):
        return
    settings: dict[str, Any] = {"use_reentrant": False}
    if operations := KEPT_OPERATIONS.get(kept):
        if any(getattr(module, "has_bias", False) for module in model.modules()):
            operations = tuple(set(operations) - set(_EXPERT_OPERATIONS))
        policy = partial(_keep_results, operations)
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    model.gradient_checkpointing_enable(settings)
    if kept == OFFLOAD_CHECKPOINTING:
        for module in model.modules():
            if checkpoint := getattr(module, "_gradient_checkpointing_func", None):
                module._gradient_checkpointing_func = partial(_with_input_on_host, checkpoint)


def _with_input_on_host(
    checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any
) -> Any:
    with save_on_cpu(pin_memory=has_pinned_memory()):
        return checkpoint(function, *args)


def _keep_results(
    operations: tuple[str, ...], _: Any, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    keep = is_among(operation, operations)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def is_among(operation: Any, names: tuple[str, ...]) -> bool:
    """Return whether a torch operation is one of these."""
    return operation.name() in names
