"""What a token takes in memory on its way through a model, counted on torch's meta device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface

ATTENTION = "hybridrl_planned"
TOKENS = 1 << 20
"""Of the row that is run, and of one twice as long: their difference is what grows with tokens."""
FEW_TOKENS = 1 << 8
"""Of a model that goes from token to token in Python, where there is no kernel for it."""
ALIKE = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers that have the same parameters and cost a token the same."""


@dataclass(frozen=True)
class TokenBytes:
    """Bytes that a token takes in memory, beside the parameters: `per_layer` x layers + `fixed`."""

    per_layer: float
    fixed: float

    def times(self, factor: float) -> TokenBytes:
        return TokenBytes(self.per_layer * factor, self.fixed * factor)

    def of(self, layers: int) -> float:
        """In a model, or stage, of so many layers."""
        return self.per_layer * layers + self.fixed


def token_bytes(
    shallow: nn.Module, deep: nn.Module, depths: tuple[int, int], trains: bool
) -> TokenBytes:
    """What a token takes in a model of some depth.

    Args:
        shallow, deep: The model with as many layers as `depths` says, on the meta device.
        trains: Also what is kept for the backward, and what that takes.
    """
    kinds = getattr(deep.config.get_text_config(), "layer_types", None) or ()
    tokens = TOKENS
    if not set(kinds) <= ALIKE:
        tokens = FEW_TOKENS
        for parameter in (*shallow.parameters(), *deep.parameters()):
            if parameter.requires_grad and trains:  # its gradient would be the larger part
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
    low, high = (
        (_peak(model, 2 * tokens, trains) - _peak(model, tokens, trains)) / tokens
        for model in (shallow, deep)
    )
    per_layer = (high - low) / (depths[1] - depths[0])
    return TokenBytes(per_layer, max(0.0, low - depths[0] * per_layer))


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _peak(model: nn.Module, tokens: int, trains: bool) -> int:
    model.zero_grad()
    with _Live(model) as live, torch.set_grad_enabled(trains):
        states = _forward(model, tokens)
        if trains:
            states.backward(torch.empty_like(states))
    return live.peak


def _forward(model: nn.Module, tokens: int) -> Tensor:
    # A mask of four dims is passed on as it is, and nobody asks for its values.
    mask = torch.empty(1, 1, 1, 1, device="meta")
    ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    return model.base_model(
        input_ids=ids, attention_mask=mask, use_cache=False
    ).last_hidden_state.squeeze(0)


class _Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, while they live; not those of the
    model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._model = {p.untyped_storage()._cdata for p in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        several = isinstance(made, list | tuple)
        if not several and getattr(made, "_base", None) is not None:
            return made  # a view of what is counted
        for tensor in made if several else (made,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._model:
                    reference = StorageWeakRef(storage)
                    self._storages[reference.cdata] = (reference, storage.nbytes())
        self._storages = {k: v for k, v in self._storages.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return made


class _Attention(torch.autograd.Function):
    """What fused attention keeps: queries, keys, values, the result and a number for each head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, heads, tokens, _ = q.shape
        out = q.new_empty(rows, tokens, heads, v.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])  # type: ignore


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
) -> tuple[Tensor, None]:
    return _Attention.apply(query, key, value).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
