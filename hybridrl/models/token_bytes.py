"""The memory of a token on its way through a model, counted on torch's meta device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from hybridrl.models.activation_checkpointing import (
    COUNTED_ATTENTION,
    PRODUCT_OPERATIONS,
    is_among,
)
from hybridrl.models.language_model import decoder_of
from hybridrl.models.linear_map import apply_linear_map
from hybridrl.models.tensor_plan import change_input_states, change_output_states

META_ATTENTION = "hybridrl_planned"
_LONG_ROW_TOKENS = 1 << 20
"""Of the row that is run, and of one twice as long: their difference is what grows with tokens."""
_SHORT_ROW_TOKENS = 1 << 8
"""Of a model whose layers do more than attention: as many as are worked on together, or more."""
MIN_ROW_TOKENS = 1 << 3
"""Of one that goes from token to token in Python, where there is no kernel for it."""
UNIFORM_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers that have the same parameters and cost a token the same."""


@dataclass(frozen=True)
class TokenBytes:
    """The bytes that a token takes in memory, beside the parameters: `per_layer` x layers +
    `fixed`."""

    per_layer: float
    fixed: float

    def times(self, factor: float) -> TokenBytes:
        return TokenBytes(self.per_layer * factor, self.fixed * factor)

    def without(self, size: float) -> TokenBytes:
        """Return what is left when each layer takes so many bytes less."""
        return TokenBytes(max(0.0, self.per_layer - size), self.fixed)

    def of(self, layers: int) -> float:
        """Return the bytes in a model, or stage, of this many layers."""
        return self.per_layer * layers + self.fixed


def find_row_tokens(shallow: PreTrainedModel, deep: PreTrainedModel) -> int:
    """Return the length of the row that tells what grows with tokens.

    Args:
        shallow, deep: The model with few and with more layers, on the meta device.
    """
    kinds = getattr(deep.config.get_text_config(), "layer_types", None) or ()
    few, more = (_run(shallow, n * MIN_ROW_TOKENS, trains=False).operations for n in (1, 2))
    if few != more:
        return MIN_ROW_TOKENS
    return _LONG_ROW_TOKENS if set(kinds) <= UNIFORM_LAYER_TYPES else _SHORT_ROW_TOKENS


def measure_token_bytes(
    shallow: PreTrainedModel,
    deep: PreTrainedModel,
    depths: tuple[int, int],
    tokens: int,
    trains: bool,
) -> TokenBytes:
    """Measure the bytes that a token takes, by the difference of two models of different depth.

    Args:
        shallow, deep: The model with as many layers as `depths` says, on the meta device.
        tokens: See `find_row_tokens`.
        trains: Also what is kept for the backward, and what that takes.
    """
    if tokens != _LONG_ROW_TOKENS:
        for parameter in (*shallow.parameters(), *deep.parameters()):
            if parameter.requires_grad and trains:  # its gradient would be the larger part
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
    low, high = (
        (_run(model, 2 * tokens, trains=trains).peak - _run(model, tokens, trains=trains).peak)
        / tokens
        for model in (shallow, deep)
    )
    per_layer = (high - low) / (depths[1] - depths[0])
    return TokenBytes(per_layer, max(0.0, low - depths[0] * per_layer))


def measure_product_bytes(
    shallow: PreTrainedModel, deep: PreTrainedModel, depths: tuple[int, int], tokens: int
) -> tuple[float, float]:
    """Measure the bytes of a token in a layer that matrix products write, and of those that they
    read or write. Attention is none of them.

    Args:
        shallow, deep, depths, tokens: As in `measure_token_bytes`, without checkpointing.
    """
    found = []
    for model in (shallow, deep):
        one, two = (_products(model, n * tokens) for n in (1, 2))
        found.append([(more - few) / tokens for few, more in zip(one, two, strict=True)])
    written, touched = ((b - a) / (depths[1] - depths[0]) for a, b in zip(*found, strict=True))
    return written, touched


def _products(model: PreTrainedModel, tokens: int) -> tuple[int, int]:
    with _Products(model) as products, torch.no_grad():
        _forward(model, tokens)
    both = products.written | products.read
    return sum(map(len, products.written.values())), sum(map(len, both.values()))


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _run(model: PreTrainedModel, tokens: int, trains: bool) -> _Live:
    model.zero_grad()
    with _Live(model) as live, torch.set_grad_enabled(trains):
        states = _forward(model, tokens)
        if trains:
            states.backward(torch.empty_like(states))
    return live


def _forward(model: PreTrainedModel, tokens: int) -> Tensor:
    # A mask of four dims is passed on as it is, and nobody asks for its values.
    mask = torch.empty(1, 1, 1, 1, device="meta")
    ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    return decoder_of(model)(
        input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False
    ).last_hidden_state.squeeze(0)


def split_tokens_between(model: PreTrainedModel, layers: Sequence[nn.Module], parts: int) -> None:
    """Have attention and MLPs see all tokens, and what is between them one of `parts`, as on a
    rank of `parallel.tensor_parallel`.

    Args:
        layers: The model's, on the meta device.
    """
    gather = change_input_states(lambda states: _resize(states, parts))
    split = change_output_states(lambda states: _resize(states, 1 / parts))
    model.get_input_embeddings().register_forward_hook(split)
    for region in (child for layer in layers for child in layer.children()):
        if any(True for _ in region.children()):  # no norm
            region.register_forward_pre_hook(gather, with_kwargs=True)
            region.register_forward_hook(split)


def _resize(states: Tensor, factor: float) -> Tensor:
    """Stand in for a collective: return states of `factor` times as many tokens."""
    shape = states.shape

    def change(x: Tensor) -> Tensor:
        return x.new_empty(shape[0], round(shape[1] * factor), shape[2])

    return apply_linear_map(states, change, lambda grad: grad.new_empty(shape))


class _Live(TorchDispatchMode):
    """A dispatch mode that counts operations, and the bytes of the storages that they make while
    these live, except those of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.operations = self.peak = self._bytes = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._model = {p.untyped_storage()._cdata for p in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        made = func(*args, **(kwargs or {}))
        several = isinstance(made, list | tuple)
        if not several and getattr(made, "_base", None) is not None:
            return made  # a view of what is counted
        for tensor in made if several else (made,):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self._bytes)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._model and key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._remove(key)), len(storage)
            self._bytes += len(storage)

    def _remove(self, key: int) -> None:
        self._bytes -= self._storages.pop(key)[1]


class _Products(TorchDispatchMode):
    """A dispatch mode that holds the storages, except those of the model, that matrix products read
    and write."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.read: dict[int, torch.UntypedStorage] = {}
        self.written: dict[int, torch.UntypedStorage] = {}
        self._model = {p.untyped_storage()._cdata for p in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if is_among(func, PRODUCT_OPERATIONS):
            for into, tensors in ((self.read, args), (self.written, [made])):
                storages = [x.untyped_storage() for x in tensors if isinstance(x, Tensor)]
                into |= {s._cdata: s for s in storages if s._cdata not in self._model}
        return made


class _Attention(torch.autograd.Function):
    """A stand-in for fused attention that keeps what it keeps: queries, keys, values, the result
    and a number for each head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, denominators = torch.ops.hybridrl.counted_attention(q, v)
        ctx.save_for_backward(q, k, v, out, denominators)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])  # type: ignore


def _compute_attention(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads, tokens, _ = q.shape
    out = q.new_empty(rows, tokens, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
) -> tuple[Tensor, None]:
    return _Attention.apply(query, key, value).transpose(1, 2), None


# An operation, so that activation checkpointing can keep its results.
torch.library.define(COUNTED_ATTENTION, "(Tensor q, Tensor v) -> (Tensor, Tensor)")
torch.library.impl(COUNTED_ATTENTION, "Meta", _compute_attention)
AttentionInterface.register(META_ATTENTION, _attention)
AttentionMaskInterface.register(META_ATTENTION, lambda *_, **__: None)
