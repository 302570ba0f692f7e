"""A frozen model some of whose layers compute in fewer bits, while its parameters stay where they
are: cut over ranks, each of which may compute in other bits, and given new values now and then."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn

from hybridrl.quantization.low_bit_linear import (
    KINDS,
    LowBitLinear,
    check_layer_bits,
    find_decoder_layers,
    find_linear_layers,
)


class LowBitScoring:
    """A frozen, sharded model's layers in fewer bits, rounded in their first forward and kept. Each
    rounds its weight in its first forward, when whoever cut it has gathered it, and keeps the
    result.

    Args:
        model: A transformers model.
        bits: By number of the layer; layers not named stay.

    Raises:
        ConfigError: see `check_layer_bits`, `find_decoder_layers`.
    """

    def __init__(self, model: nn.Module, bits: Mapping[int, int]) -> None:
        layers = find_decoder_layers(model)
        check_layer_bits(bits, len(layers))
        self._kept: dict[nn.Linear, LowBitLinear] = {}
        for number, wanted in bits.items():
            for linear in find_linear_layers(layers[number]).values():
                forward = partial(self._forward, linear, KINDS[wanted])
                linear.forward = forward  # type: ignore[method-assign]

    def forget(self) -> None:
        """Drop the rounded weights; the next forward rounds the new ones."""
        self._kept.clear()

    def _forward(self, linear: nn.Linear, kind: type[LowBitLinear], x: Tensor) -> Tensor:
        if linear not in self._kept:
            low = self._kept[linear] = kind(linear)
            low.bias = None  # the parameter may be another object when it is gathered again
        products: Tensor = self._kept[linear](x)
        return products if linear.bias is None else products + linear.bias
