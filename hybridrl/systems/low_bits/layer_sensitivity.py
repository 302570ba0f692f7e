"""What fewer bits in each layer would change of a model's answers, by a few samples of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridrl.compress.sensitivity import activation_kl, bfloat16_kl, token_kls, weight_kl
from hybridrl.errors import DataError
from hybridrl.models.language_model import decoder_of
from hybridrl.models.log_probs import LogitScale, soft_cap_of
from hybridrl.models.packed_attention import NAME
from hybridrl.models.packing import Packing
from hybridrl.models.row_quantization import INT8, LARGEST
from hybridrl.system.device_traits import logits_at_a_time
from hybridrl.systems.low_bits.low_bit_linear import (
    GROUP,
    LARGEST_HALF,
    check_bits,
    decoder_layers,
    linears,
    low_bits,
)

LARGEST_BYTE = int(LARGEST[INT8])


def indicator(
    model: PreTrainedModel,
    samples: Sequence[Tensor],
    bits: Sequence[int] = (8, 4),
    seed: int = 0,
) -> dict[int, dict[int, float]]:
    """By decoder layer and bits, the KL that the layer's linear layers would add in so few bits,
    nats a token; see `hybridrl.compress.sensitivity`. Takes a forward and a backward of each
    sample, and the gradient of one weight at a time.

    Args:
        model: A causal language model with all of its weights, none of them in fewer bits.
        samples: Token ids ``[tokens]`` of each.
        bits: 16 (bfloat16), 8, 4; for 32 it is 0, and for 16 of a model that is in 16.
        seed: Of the tokens that the model draws in place of the samples' own.

    Raises:
        DataError: if there is no token.
        ConfigError: see `check_bits`, `decoder_layers`.
    """
    layers = decoder_layers(model)
    for number in bits:
        check_bits({0: number}, len(layers))
    found = {layer: dict.fromkeys(bits, 0.0) for layer in range(len(layers))}
    tokens = _tokens(samples)
    generator = torch.Generator().manual_seed(seed)
    with ExitStack() as watched:
        for layer, module in enumerate(layers):
            for linear in linears(module).values():
                watched.enter_context(_watched(linear, found[layer]))
        for ids in filter(len, samples):
            with torch.enable_grad():
                _drawn_log_prob(model, ids, generator).backward()
    return {n: {b: value / tokens for b, value in by.items()} for n, by in found.items()}


@torch.no_grad()
def token_kl(
    model: PreTrainedModel, samples: Sequence[Tensor], bits: Mapping[int, int], whole: int = 16
) -> float:
    """KL(with these bits || whole), the mean over the samples' tokens, nats: measured, by which
    indicators can be checked. The model is afterwards as it was. `whole` is that of `apply_bits`.

    Raises:
        DataError: if there is no token.
        ConfigError: see `apply_bits`.
    """
    tokens = _tokens(samples)
    wholes = [_hidden(model, ids) for ids in filter(len, samples)]
    with low_bits(model, bits, whole):
        low = [_hidden(model, ids) for ids in filter(len, samples)]
    total = 0.0
    for states, others in zip(low, wholes, strict=True):
        size = max(
            1, logits_at_a_time(states.device.type) // model.config.get_text_config().vocab_size
        )
        for part, other in zip(states.split(size), others.split(size), strict=True):
            total += float(token_kls(_log_probs(model, part), _log_probs(model, other)).sum())
    return total / tokens


def _tokens(samples: Sequence[Tensor]) -> int:
    if not (tokens := sum(len(ids) for ids in samples)):
        raise DataError("There is no token to measure with: give samples that are not empty.")
    return tokens


def _hidden(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The last hidden states of a sample, ``[tokens, hidden]``."""
    device = model.get_input_embeddings().weight.device
    further: dict[str, Any] = {}
    if model.config._attn_implementation == NAME:
        further["packing"] = Packing.of(torch.tensor([0, len(ids)]), device)
    outputs = decoder_of(model)(input_ids=ids.to(device)[None], use_cache=False, **further)
    states: Tensor = outputs.last_hidden_state[0]
    return states


def _log_probs(model: PreTrainedModel, states: Tensor) -> Tensor:
    scale = LogitScale(soft_cap=soft_cap_of(model.config))
    return scale.apply(model.get_output_embeddings()(states).float()).log_softmax(1)


def _drawn_log_prob(model: PreTrainedModel, ids: Tensor, generator: torch.Generator) -> Tensor:
    """log p of tokens that the model draws after each of a sample's."""
    log_probs = _log_probs(model, _hidden(model, ids))
    chances = log_probs.detach().exp().cpu()
    drawn = torch.multinomial(chances, 1, generator=generator).to(log_probs.device)
    return log_probs.gather(1, drawn).sum()


@contextmanager
def _watched(linear: nn.Linear, found: dict[int, float]) -> Iterator[None]:
    """Inside, each backward adds to `found` what this layer's bits would cost. No gradient is
    kept."""
    weight, learned = linear.weight, linear.weight.requires_grad
    is_half = weight.dtype is not torch.float32

    def add_weights(parameter: Tensor) -> None:
        assert parameter.grad is not None
        value, gradient = weight.detach(), parameter.grad
        for bits in found:
            if bits == 16 and not is_half:
                found[bits] += bfloat16_kl(value, gradient)
            elif bits == 8:
                found[bits] += weight_kl(value, gradient, LARGEST_BYTE)
            elif bits == 4:
                found[bits] += weight_kl(value, gradient, LARGEST_HALF, GROUP)
        parameter.grad = None

    def add_inputs(x: Tensor, gradient: Tensor) -> None:
        x, gradient = x.detach().flatten(0, -2), gradient.flatten(0, -2)
        if 16 in found and not is_half:
            found[16] += bfloat16_kl(x, gradient)
        if 8 in found:
            found[8] += activation_kl(x, gradient, LARGEST_BYTE)

    def own_inputs(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *others = arguments
        own = x.view_as(x)  # of which only this layer makes a gradient
        if own.requires_grad:
            own.register_hook(partial(add_inputs, x))
        return own, *others

    weight.requires_grad_(True)
    handles = [
        weight.register_post_accumulate_grad_hook(add_weights),
        linear.register_forward_pre_hook(own_inputs),
    ]
    try:
        yield
    finally:
        weight.requires_grad_(learned)
        for handle in handles:
            handle.remove()
