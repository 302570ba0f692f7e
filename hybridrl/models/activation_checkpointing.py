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

NO_CHECKPOINTING, SELECTIVE_CHECKPOINTING, FULL_CHECKPOINTING, OFFLOAD_CHECKPOINTING = (
    CHECKPOINTING_MODES
)
_EXPENSIVE = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm"),
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward",
)
"""Operations whose results `selective` keeps: matrix products and attention."""


def set_activation_checkpointing(model: PreTrainedModel, kept: str) -> None:
    """Set the part of its forward that every layer keeps for the backward.

    Args:
        kept: `none`: nothing is computed twice, so all is kept. `selective`: results of matrix
            products and attention; the rest, which is cheap, is computed again. `full`: its input
            only. `offload`: that too, in the host's memory.
    """
    if kept == NO_CHECKPOINTING:
        return
    settings: dict[str, Any] = {"use_reentrant": False}
    if kept == SELECTIVE_CHECKPOINTING:
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
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


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = _is_expensive(operation)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_expensive(operation: Any) -> bool:
    return operation.name() in _EXPENSIVE
