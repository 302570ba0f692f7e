"""`actor.compile`: transformer layers compiled by torch, with one graph for all layers of a kind.

Attention, linear attention and collectives stay as they are, between the compiled parts. Attention
is a fused kernel already, and has the bounds of the samples, which differ from batch to batch. A
linear attention whose kernel is not installed loops over pieces of a sample, and would be compiled
anew for each number of them. So what a layer keeps for its backward is what attention keeps, and
what the compiler keeps of the parts before and after it.
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
_MOST_GRAPHS = 64
"""Of the forward of a class of layers: with and without gradients, of one row and of several, and
of each kind of mixer and of feed-forward that its layers have. Torch's own limit is 8."""
_KERNELS = "hub_kernels.py"
"""What in transformers puts the kernels of other packages in the place of its own functions."""
MEMORY_BUDGETS = {SELECTIVE_CHECKPOINTING: 0.8, BLOCK_CHECKPOINTING: 0.0}
"""What the parts of compiled layers may keep by `actor.gradient_checkpointing`, from 0, their
inputs, to 1, what makes them quickest: about two thirds of it are results of matrix products."""


def compile_layers(
    model: PackedModel, wanted: str, device: torch.device, kept: str = NO_CHECKPOINTING
) -> bool:
    """Compile every layer at its first run, in place. A layer that does not compile runs
    uncompiled, and the log says why.

    Args:
        wanted: `true`, `false`, or `auto`: where that is known to gain. A small model is trained
            to its end in the time that compiling takes.
        kept: As `actor.gradient_checkpointing`. Compiled layers keep what `MEMORY_BUDGETS` says.

    Returns:
        Whether layers are compiled.
    """
    gains = is_compile_worthwhile(device.type) and not is_small_model(model)
    if wanted == "false" or (wanted == AUTO_DTYPE and not gains):
        return False
    import torch._dynamo as dynamo

    if dynamo.config.disable:
        _log.warning(
            "actor.compile=%s: the layers are not compiled, because another part of this process "
            "has switched torch's compiler off (vLLM on CPUs, or TORCHDYNAMO_DISABLE).",
            wanted,
        )
        return False
    AttentionInterface.register(PACKED_ATTENTION, dynamo.disable(packed_attention))
    dynamo.config.recompile_limit = max(_MOST_GRAPHS, dynamo.config.recompile_limit)
    kinds = set(model.inner._no_split_modules or ())
    compiled = partial(torch.compile, dynamic=True)
    if (budget := MEMORY_BUDGETS.get(kept)) is not None:
        compiled = partial(compiled, backend=_budget_backend(budget))
    for module in model.inner.modules():
        if type(module).__name__ in kinds:
            _leave_out_kernels(type(module).__module__)
            module.forward = _with_fallback(module, compiled(module.forward))
    return True


@cache
def _leave_out_kernels(modeling: str) -> None:
    """Keep the functions of a module of transformers out of graphs that have, or could have, a
    kernel of another package in their place."""
    import torch._dynamo as dynamo

    functions = vars(sys.modules[modeling])
    for name, function in list(functions.items()):
        if inspect.isfunction(function) and _takes_kernel(function):
            functions[name] = dynamo.disable(function)


def _takes_kernel(function: Callable[..., Any] | None) -> bool:
    while function is not None:
        if inspect.isfunction(function) and function.__code__.co_filename.endswith(_KERNELS):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


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
