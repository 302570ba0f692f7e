"""Predict how much a model's answers change when matrix products are computed in fewer bits, layer
by layer from a few samples of tokens (`measure_sensitivity`), and measure it (`token_kl`).

Rounding to nearest on a grid of step s adds noise of variance s^2 / 12 to each value. The KL
between the answers before and after is, to second order, half of that noise weighed by the Fisher
information: the expected square of the gradient of log p of tokens that the model itself draws
(Kunstner et al. 2019, arXiv:1905.12558, section 2). For y = W x, over the tokens t of a sample:

    weights       1/24 sum_ij s_ij^2 (d log p / d W_ij)^2
    activations   1/24 sum_t  s_t^2 |d log p / d x_t|^2

With all outputs equally important the first is s_w^2 Var(x), by which LLM-PQ chooses bits (Zhao et
al. 2024, arXiv:2403.01136), and the two are the terms of QSync's bound for 8-bit products,
|v|^2 s_w^2 + |w|^2 s_v^2 (Zhao et al. 2024, arXiv:2407.02327), whose 1/6 is for stochastic
rounding. The sum over a layer's products is its indicator, in nats a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridrl.errors import DataError
from hybridrl.models.language_model import attention_of, decoder_of
from hybridrl.models.log_probs import LogitScale, soft_cap_of, split_tokens
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_samples import PackingMetadata
from hybridrl.quantization.low_bit_linear import (
    INT4_GROUP_SIZE,
    INT4_MAX,
    check_layer_bits,
    find_decoder_layers,
    find_linear_layers,
    temporary_layer_bits,
)
from hybridrl.quantization.rounded_matrix import INT8, LARGEST

LARGEST_BYTE = int(LARGEST[INT8])


def measure_sensitivity(
    model: PreTrainedModel, samples: Sequence[Tensor], bits: Sequence[int] = (8, 4)
) -> dict[int, dict[int, float]]:
    """Predict the KL, in nats a token, that the linear layers of each decoder layer would add in
    fewer bits, by layer and bits. Takes a forward and a backward of each sample, and the gradient
    of one weight at a time. The tokens that the model draws are the same in every call.

    Args:
        model: A causal language model with all of its weights, none of them in fewer bits.
        samples: Token ids ``[tokens]`` of each.
        bits: 16 (bfloat16), 8, 4; for 32 it is 0, and for 16 of a model that is in 16.

    Raises:
        DataError: if there is no token.
        ConfigError: see `check_layer_bits`, `find_decoder_layers`.
    """
    layers = find_decoder_layers(model)
    for number in bits:
        check_layer_bits({0: number}, len(layers))
    found = {layer: dict.fromkeys(bits, 0.0) for layer in range(len(layers))}
    tokens = _tokens(samples)
    generator = torch.Generator().manual_seed(0)
    with ExitStack() as watched:
        for layer, module in enumerate(layers):
            for linear in find_linear_layers(module).values():
                watched.enter_context(_watched(linear, found[layer]))
        for ids in filter(len, samples):
            with torch.enable_grad():
                _drawn_log_prob(model, ids, generator).backward()
    return {n: {b: value / tokens for b, value in by.items()} for n, by in found.items()}


@torch.no_grad()
def token_kl(
    model: PreTrainedModel, samples: Sequence[Tensor], bits: Mapping[int, int], whole: int = 16
) -> float:
    """Measure KL(with these bits || whole), the mean over the samples' tokens, in nats. The model
    is afterwards as it was. `whole` is that of `apply_layer_bits`.

    Raises:
        DataError: if there is no token.
        ConfigError: see `apply_layer_bits`.
    """
    tokens = _tokens(samples)
    wholes = [_hidden(model, ids) for ids in filter(len, samples)]
    with temporary_layer_bits(model, bits, whole):
        low = [_hidden(model, ids) for ids in filter(len, samples)]
    total = 0.0
    for states, others in zip(low, wholes, strict=True):
        for chunk in split_tokens(states, model.get_output_embeddings().weight):
            p, q = (_log_probs(model, part[chunk]) for part in (states, others))
            total += float(token_kl_divergence(p, q).sum())
    return total / tokens


def _tokens(samples: Sequence[Tensor]) -> int:
    if not (tokens := sum(len(ids) for ids in samples)):
        raise DataError("There is no token to measure with: give samples that are not empty.")
    return tokens


def _hidden(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the last hidden states of a sample, ``[tokens, hidden]``."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    device = weight.device
    further: dict[str, Any] = {}
    if attention_of(model) == PACKED_ATTENTION:
        further["packing"] = PackingMetadata.of(torch.tensor([0, len(ids)]), device)
    outputs = decoder_of(model)(input_ids=ids.to(device)[None], use_cache=False, **further)
    states: Tensor = outputs.last_hidden_state[0]
    return states


def _log_probs(model: PreTrainedModel, states: Tensor) -> Tensor:
    scale = LogitScale(soft_cap=soft_cap_of(model.config))
    return scale.apply(model.get_output_embeddings()(states).float()).log_softmax(1)


def _drawn_log_prob(model: PreTrainedModel, ids: Tensor, generator: torch.Generator) -> Tensor:
    """Return log p of tokens that the model draws after each token of a sample."""
    log_probs = _log_probs(model, _hidden(model, ids))
    chances = log_probs.detach().exp().cpu()
    drawn = torch.multinomial(chances, 1, generator=generator).to(log_probs.device)
    return log_probs.gather(1, drawn).sum()


@contextmanager
def _watched(linear: nn.Linear, found: dict[int, float]) -> Iterator[None]:
    """Add this layer's cost of fewer bits to `found` in every backward inside the block. No
    gradient is kept."""
    weight, learned = linear.weight, linear.weight.requires_grad
    is_half = weight.dtype is not torch.float32

    def add_weights(parameter: Tensor) -> None:
        assert parameter.grad is not None
        value, gradient = weight.detach(), parameter.grad
        for bits in found:
            if bits == 16 and not is_half:
                found[bits] += bfloat16_rounding_kl(value, gradient)
            elif bits == 8:
                found[bits] += weight_rounding_kl(value, gradient, LARGEST_BYTE)
            elif bits == 4:
                found[bits] += weight_rounding_kl(value, gradient, INT4_MAX, INT4_GROUP_SIZE)
        parameter.grad = None

    def add_inputs(x: Tensor, gradient: Tensor) -> None:
        x, gradient = x.detach().flatten(0, -2), gradient.flatten(0, -2)
        if 16 in found and not is_half:
            found[16] += bfloat16_rounding_kl(x, gradient)
        if 8 in found:
            found[8] += activation_rounding_kl(x, gradient, LARGEST_BYTE)

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


NEAREST = 1 / 12
"""Variance of rounding to nearest, in squares of the grid's step."""


def weight_rounding_kl(
    weight: Tensor, gradient: Tensor, largest: int, group: int | None = None
) -> float:
    """Return the nats that rounding a weight adds to the KL of one sample.

    Args:
        weight: ``[outputs, inputs]``.
        gradient: Of the sample's log p by the weight, for tokens drawn from the model.
        largest: Code of the largest value of those that share a scale, such as 127.
        group: Neighbouring inputs that share a scale; None: all of a row.
    """
    size = group or weight.shape[1]
    beyond = (0, -weight.shape[1] % size)
    steps = F.pad(weight.float(), beyond).unflatten(1, (-1, size)).abs().amax(2) / largest
    squares = F.pad(gradient.float(), beyond).unflatten(1, (-1, size)).square().sum(2)
    return float(0.5 * NEAREST * (steps.square() * squares).sum())


def activation_rounding_kl(inputs: Tensor, gradient: Tensor, largest: int) -> float:
    """Return the nats that rounding a product's inputs, token by token, adds to the KL of one
    sample.

    Args:
        inputs: ``[tokens, inputs]``.
        gradient: Of log p by these inputs, through this product alone.
        largest: Code of a token's largest value.
    """
    steps = inputs.float().abs().amax(1) / largest
    return float(0.5 * NEAREST * (steps.square() * gradient.float().square().sum(1)).sum())


def bfloat16_rounding_kl(values: Tensor, gradient: Tensor) -> float:
    """Return the nats that rounding a product's weights or inputs to bfloat16 adds to the KL of one
    sample. The step of the grid is a 128th to a 256th of a value."""
    return float(0.5 * NEAREST * 2.0**-15 * (values.float() * gradient.float()).square().sum())


def token_kl_divergence(log_probs: Tensor, others: Tensor) -> Tensor:
    """Return KL(p || q) of each token, `[tokens]`, for log-probabilities `[tokens, vocabulary]`."""
    return (log_probs.exp() * (log_probs - others)).sum(1).clamp_min(0)
