"""Linear layers that learn with products in 8 or 16 bits, around weights that stay in float32.

8 bits: forward ``y = x W^T`` and backward ``dx = dy W``, ``dW = dy^T x`` each round both factors, a
scale for every row of one and every column of the other, and sum the integers' products in 32 bits.
The gradient of rounding is taken as 1 (straight-through, Bengio et al. 2013, arXiv:1308.3432).
Weights and activations are rounded to nearest; gradients stochastically, so that their mean is
right (Zhao et al. 2024, "QSync", arXiv:2407.02327, whose backward does so). 16 bits are bfloat16.

Weights are rounded in each forward from what they are then, so optimizers, FSDP and checkpoints see
parameters as always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridrl.errors import ConfigError
from hybridrl.quantization.int8_products import Int8Weight, int8_matmul_once
from hybridrl.quantization.low_bit_linear import (
    check_layer_bits,
    find_decoder_layers,
    find_linear_layers,
)
from hybridrl.quantization.rounded_matrix import Rows, quantize_columns_int8, quantize_rows_int8


def enable_low_bit_training(model: nn.Module, bits: Mapping[int, int]) -> None:
    """Set the linear layers inside these decoder layers to compute in fewer bits from now on.

    Args:
        model: A transformers model; its parameters stay what they are.
        bits: 8, or 16 for bfloat16, by number of the layer; layers not named stay.

    Raises:
        ConfigError: see `check_layer_bits`, `find_decoder_layers`; for bits in which nothing
            learns.
    """
    layers = find_decoder_layers(model)
    check_layer_bits(bits, len(layers))
    for number, wanted in bits.items():
        if wanted not in _FORWARDS:
            raise ConfigError(
                f"The plan wants layer {number} to learn in {wanted} bits: there are 8 and 16."
            )
        for linear in find_linear_layers(layers[number]).values():
            linear.forward = MethodType(_FORWARDS[wanted], linear)  # type: ignore[method-assign]


def _forward8(linear: nn.Linear, x: Tensor) -> Tensor:
    products = _multiply_int8(x.flatten(0, -2), linear.weight)
    if linear.bias is not None:
        products = products + linear.bias
    found: Tensor = products.unflatten(0, x.shape[:-1])
    return found


def _forward16(linear: nn.Linear, x: Tensor) -> Tensor:
    products = F.linear(x.bfloat16(), linear.weight.bfloat16()).to(x.dtype)
    return products if linear.bias is None else products + linear.bias


_FORWARDS = {8: _forward8, 16: _forward16}


class Int8LinearFunction(torch.autograd.Function):
    """An autograd function: ``[tokens, inputs]`` times ``[outputs, inputs]``, in int8 both ways.

    The gradient is rounded once, a scale for each token. In ``dW`` tokens are summed over, so there
    each token's scale goes to its inputs before these are rounded.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return Int8Weight(quantize_rows_int8(weight)).multiply(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        rows = quantize_rows_int8(gradient, stochastic=True)
        if ctx.needs_input_grad[0]:
            of_x = int8_matmul_once(rows, quantize_columns_int8(weight), x.dtype)
        if ctx.needs_input_grad[1]:
            inputs = quantize_columns_int8(x, rows.scales)
            outputs = Rows(rows.values.t(), torch.ones(len(weight), 1, device=x.device))
            of_weight = int8_matmul_once(outputs, inputs, weight.dtype)
        return of_x, of_weight


_multiply_int8: Callable[[Tensor, Tensor], Tensor] = Int8LinearFunction.apply
