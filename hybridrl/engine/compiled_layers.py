"""`actor.compile`: transformer layers compiled by torch, with one graph for all layers of a kind.

Attention, linear attention and collectives stay as they are, between the compiled parts. Attention
is a fused kernel already, and has the bounds of the samples, which differ from batch to batch. A
linear attention whose kernel is not installed loops over pieces of a sample, and would be compiled
anew for each number of them. So what a layer keeps for its backward is what attention keeps, and
what the compiler keeps of the parts before and after it. Where memory is limited, a layer with
linear attention keeps its input only.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from hybridrl.models.activation_checkpointing import (
    BLOCK_CHECKPOINTING,
    FULL_CHECKPOINTING,
    NO_CHECKPOINTING,
    SELECTIVE_CHECKPOINTING,
)
from hybridrl.models.packed_attention import PACKED_ATTENTION, packed_attention
from hybridrl.models.packed_models import PackedModel
from hybridrl.parallel.fsdp import is_small_model
from hybridrl.system.device_traits import is_compile_worthwhile
from hybridrl.system.dtypes import AUTO_DTYPE

_log = logging.getLogger(__name__)

_BACKEND = "inductor"
_MOST_GRAPHS = 32
"""Of the forward of a class of layers: with and without gradients, of one row and of several, of
each kind of mixer and of feed-forward that its layers have, and of the first sizes and of all
others. Jamba has 19. Torch's own limit is 8."""
_KERNELS = "hub_kernels.py"
"""What in transformers puts the kernels of other packages in the place of its own functions."""
_MEMORY_BUDGETS = {SELECTIVE_CHECKPOINTING: 0.8, BLOCK_CHECKPOINTING: 0.0}
"""What the parts of compiled layers may keep by `actor.gradient_checkpointing`, from 0, their
inputs, to 1, what makes them quickest: about two thirds of it are results of matrix products."""


def compile_layers(
    model: PackedModel, wanted: str, device: torch.device, kept: str = NO_CHECKPOINTING
) -> str:
    """Compile every layer at its first run, in place. A layer that does not compile runs
    uncompiled, and the log says why.

    Args:
        wanted: `true`, `false`, or `auto`: where that is known to gain. A small model is trained
            to its end in the time that compiling takes.
        kept: As `actor.gradient_checkpointing`.

    Returns:
        The checkpointing that layers still need around them: `none` where compiled parts keep what
        `_MEMORY_BUDGETS` says; `full` instead where there are kernels between these parts, whose
        memory no budget limits; else as given.
    """
    gains = is_compile_worthwhile(device.type) and not is_small_model(model)
    if wanted == "false" or (wanted == AUTO_DTYPE and not gains):
        return kept
    import torch._dynamo as dynamo

    if dynamo.config.disable:
        _log.warning(
            "actor.compile=%s: the layers are not compiled, because another part of this process "
            "has switched torch's compiler off (vLLM on CPUs, or TORCHDYNAMO_DISABLE).",
            wanted,
        )
        return kept
    AttentionInterface.register(PACKED_ATTENTION, dynamo.disable(packed_attention))
    dynamo.config.recompile_limit = max(_MOST_GRAPHS, dynamo.config.recompile_limit)
    kinds = set(model.inner._no_split_modules or ())
    # What differs between two runs becomes a symbol: numbers of samples and of tokens. If all sizes
    # were symbols from the start, widths would be, too, in what is sharded or between two graphs,
    # and torch 2.13 fails to order the strides of linear attention's parts.
    compiled = partial(torch.compile, dynamic=None)
    layers = [one for one in model.inner.modules() if type(one).__name__ in kinds]
    left_out = [_leave_out_kernels(name) for name in {type(layer).__module__ for layer in layers}]
    budget = _MEMORY_BUDGETS.get(kept)
    if budget is not None and not any(left_out):
        compiled = partial(compiled, backend=_budget_backend(budget))
    for layer in layers:
        layer.forward = _with_fallback(layer, compiled(layer.forward))
    if budget is None:
        return kept
    return FULL_CHECKPOINTING if any(left_out) else NO_CHECKPOINTING


@cache
def _leave_out_kernels(modeling: str) -> bool:
    """Keep the functions of a module of transformers out of graphs that have, or could have, a
    kernel of another package in their place; return whether there are any."""
    import torch._dynamo as dynamo

    def leave_out(kernel: Callable[..., Any]) -> Callable[..., Any]:
        return dynamo.disable(lambda *args, **kwargs: kernel(*args, **kwargs))

    members = vars(sys.modules[modeling])
    kernels = {name: one for name, one in members.items() if _takes_kernel(one, modeling)}
    members.update({name: leave_out(kernel) for name, kernel in kernels.items()})
    return bool(kernels)


def _takes_kernel(member: Any, modeling: str) -> bool:
    """Return whether the member is such a function of this module, or the module that the package
    `kernels` makes of one. Of others, such as rotary embeddings, it makes modules, too."""
    if isinstance(member, nn.Module) and type(member).__module__.startswith("kernels."):
        member = inspect.getclosurevars(type(member).forward).nonlocals.get("func")
    if not inspect.isfunction(member) or member.__module__ != modeling:
        return False
    is_wrapped = hasattr(member, "__wrapped__")
    return is_wrapped and member.__code__.co_filename.endswith(_KERNELS)


@cache
def _budget_backend(budget: float) -> Callable[..., Any]:
    """Return one backend for all layers, which share graphs only if their backend is the same."""
    from torch._dynamo.backends.registry import lookup_backend
    from torch._functorch import config

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        with config.patch(activation_memory_budget=budget):
            return lookup_backend(_BACKEND)(graph, inputs)

    return compile_graph


def _with_fallback(layer: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    plain = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        try:
            return compiled(*args, **kwargs)
        except (TorchDynamoException, InductorError) as error:
            if compiled is plain:
                raise
            _log.warning(
                "actor.compile: a %s does not compile and runs as it is (%s: %s).",
                type(layer).__name__,
                type(error).__name__,
                str(error).strip().partition("\n")[0],
            )
            compiled = plain
            return plain(*args, **kwargs)

    return forward
