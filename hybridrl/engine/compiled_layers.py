"""`actor.compile`: transformer layers compiled by torch, with one graph for all layers of a kind.

Attention and collectives stay as they are, between the compiled parts: the one is a fused kernel
already, and has the bounds of the samples, which differ from batch to batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from hybridrl.models.packed_attention import PACKED_ATTENTION, packed_attention
from hybridrl.models.packed_models import PackedModel
from hybridrl.parallel.fsdp import is_small_model
from hybridrl.system.device_traits import is_compile_worthwhile
from hybridrl.system.dtypes import AUTO_DTYPE

_log = logging.getLogger(__name__)


def compile_layers(model: PackedModel, wanted: str, device: torch.device) -> None:
    """Compile every layer at its first run, in place. A layer that does not compile runs
    uncompiled, and the log says why.

    Args:
        wanted: `true`, `false`, or `auto`: where that is known to gain. A small model is trained
            to its end in the time that compiling takes.
    """
    gains = is_compile_worthwhile(device.type) and not is_small_model(model)
    if wanted == "false" or (wanted == AUTO_DTYPE and not gains):
        return
    import torch._dynamo as dynamo

    if dynamo.config.disable:
        _log.warning(
            "actor.compile=%s: the layers are not compiled, because another part of this process "
            "has switched torch's compiler off (vLLM on CPUs, or TORCHDYNAMO_DISABLE).",
            wanted,
        )
        return
    AttentionInterface.register(PACKED_ATTENTION, dynamo.disable(packed_attention))
    kinds = set(model.inner._no_split_modules or ())
    for module in model.inner.modules():
        if type(module).__name__ in kinds:
            module.forward = _with_fallback(module, torch.compile(module.forward, dynamic=True))


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
