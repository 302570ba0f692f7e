"""Linear layers with weights of 8 or 4 bits, in place of those of a frozen model.

8 bits: activations are rounded, too, and integers are multiplied (`int8_products`). 4 bits: weights
only, with a scale for each group of 64 inputs (the grouping of Frantar et al. 2022, "GPTQ",
arXiv:2210.17323; rounding is to nearest here), and each call brings them back to the precision of
its input: less memory, not less time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.errors import ConfigError
from hybridrl.models.language_model import build_language_model, decoder_of
from hybridrl.models.shrunk_config import shrink_config
from hybridrl.quantization.int8_products import Int8Weight
from hybridrl.quantization.rounded_matrix import INT8, SMALLEST_SCALE, quantize_rows

BITS = (4, 8, 16, 32)
INT4_GROUP_SIZE = 64
INT4_MAX = 7
"""Of 4 bits; symmetric, so -8 is not used."""


class LowBitLinear(nn.Module):
    """A layer that computes what a linear layer does, in fewer bits, and learns nothing.

    Args:
        linear: What it stands for; its weight is rounded and not kept, its bias is kept.

    Attributes:
        bits: 8 or 4.
        bias: The layer's own parameter, or None.
    """

    bits: int

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias: nn.Parameter | None = linear.bias
        self.set_weight(linear.weight)

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Round a whole weight ``[outputs, inputs]`` of any dtype, and keep it."""
        if weight.shape != (self.out_features, self.in_features):
            raise ValueError(
                f"A weight of {list(weight.shape)} came for a layer of "
                f"{[self.out_features, self.in_features]}."
            )
        self._take(weight.detach())

    def dequantised(self) -> Tensor:
        """Return the rounded weight in float32, ``[outputs, inputs]``."""
        raise NotImplementedError

    def _take(self, weight: Tensor) -> None:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bits={self.bits}"


class Int8Linear(LowBitLinear):
    """A linear layer that multiplies int8 by int8."""

    bits = 8

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        products = self._weight.multiply(x)
        return products if self.bias is None else products.add_(self.bias)

    def dequantised(self) -> Tensor:
        return self._weight.whole()

    def _take(self, weight: Tensor) -> None:
        self._weight = Int8Weight(quantize_rows(weight, INT8))


class Int4Linear(LowBitLinear):
    """A linear layer with weights of 4 bits, two of which share a byte."""

    bits = 4

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self._whole(x.dtype), self.bias)

    def dequantised(self) -> Tensor:
        return self._whole(torch.float32)

    def _take(self, weight: Tensor) -> None:
        groups = F.pad(weight.float(), (0, -self.in_features % INT4_GROUP_SIZE)).unflatten(
            1, (-1, INT4_GROUP_SIZE)
        )
        largest = groups.abs().amax(2, keepdim=True)
        self._scales = (largest / INT4_MAX).clamp_min(SMALLEST_SCALE)
        codes = (groups / self._scales).round_().add_(INT4_MAX).to(torch.uint8)
        first, second = codes.chunk(2, dim=2)
        self._codes = first | (second << 4)

    def _whole(self, dtype: torch.dtype) -> Tensor:
        both = torch.cat([self._codes & 15, self._codes >> 4], dim=2)
        values = both.to(dtype).sub_(INT4_MAX).mul_(self._scales.to(dtype))
        return values.flatten(1)[:, : self.in_features]


class BFloat16Linear(LowBitLinear):
    """A linear layer that multiplies bfloat16 by bfloat16, for a model in float32."""

    bits = 16

    def forward(self, x: Tensor) -> Tensor:
        products = F.linear(x.bfloat16(), self._weight).to(x.dtype)
        return products if self.bias is None else products.add_(self.bias)

    def dequantised(self) -> Tensor:
        return self._weight.float()

    def _take(self, weight: Tensor) -> None:
        self._weight = weight.to(torch.bfloat16, copy=True)


KINDS: dict[int, type[LowBitLinear]] = {16: BFloat16Linear, 8: Int8Linear, 4: Int4Linear}


def find_decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of a transformers model, which plans count from 0.

    Raises:
        ConfigError: if it has none under the usual name.
    """
    base = decoder_of(model) if isinstance(model, PreTrainedModel) else model
    found = getattr(base, "layers", None)
    if not isinstance(found, nn.ModuleList):
        raise ConfigError(
            f"{type(model).__name__} has no list of decoder layers (`layers`), so bits cannot be "
            "chosen by layer. Leave the plan of bits away for this model."
        )
    return found


def find_linear_layers(layer: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers inside a decoder layer, by their names in it."""
    return {name: m for name, m in layer.named_modules() if type(m) is nn.Linear}


def check_layer_bits(bits: Mapping[int, int], layers: int) -> None:
    """Refuse bits without a kernel, and layers that the model does not have.

    Raises:
        ConfigError: names the layer.
    """
    for layer, number in bits.items():
        if not 0 <= layer < layers:
            raise ConfigError(
                f"The plan has bits for layer {layer}, and the model has layers 0 to {layers - 1}. "
                "Make the plan again for this model."
            )
        if number not in BITS:
            raise ConfigError(
                f"The plan wants layer {layer} in {number} bits: there are "
                f"{', '.join(map(str, BITS))}."
            )


def apply_layer_bits(model: nn.Module, bits: Mapping[int, int], whole: int = 16) -> None:
    """Replace the linear layers inside decoder layers by `LowBitLinear`s, for good.

    Args:
        model: A transformers model with its weights, on the device to compute on.
        bits: By number of the decoder layer; layers not named stay.
        whole: Layers of so many bits or more stay as they are. 32 for a model in float32 some of
            whose layers are to be in bfloat16.

    Raises:
        ConfigError: see `check_layer_bits`, `find_decoder_layers`.
    """
    layers = find_decoder_layers(model)
    check_layer_bits(bits, len(layers))
    for number, wanted in bits.items():
        if wanted < whole:
            for name, linear in find_linear_layers(layers[number]).items():
                layers[number].set_submodule(name, KINDS[wanted](linear))


@contextmanager
def temporary_layer_bits(
    model: nn.Module, bits: Mapping[int, int], whole: int = 16
) -> Iterator[None]:
    """Apply bits as `apply_layer_bits` inside the block, and restore the model bit for bit."""
    layers = find_decoder_layers(model)
    before = {
        number: find_linear_layers(layers[number]) for number in bits if 0 <= number < len(layers)
    }
    apply_layer_bits(model, bits, whole)
    try:
        yield
    finally:
        for number, linears in before.items():
            for name, linear in linears.items():
                layers[number].set_submodule(name, linear)


class LowBitScoring:
    """A frozen model some of whose layers compute in fewer bits, while its parameters stay where
    they are: cut over ranks, each of which may compute in other bits, and given new values now and
    then. A layer rounds its weight in its first forward, when whoever cut it has gathered it, and
    keeps the result.

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


LATENT = "kv_lora_rank"
"""What configurations have whose attention keeps latent states, and multiplies its linear layers'
weights with each other before it begins (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1)."""


def check_linear_layers(
    config: PretrainedConfig,
    setting: str,
    path: str,
    cure: str = "Set rollout.quantization=none.",
) -> None:
    """Refuse a setting that needs plain linear layers, for a model that has other weights.

    Args:
        cure: What to do then.

    Raises:
        ConfigError: names the setting and what the model has.
    """
    if getattr(config.get_text_config(), LATENT, None):
        found = "latent attention, which multiplies weights with each other"
    else:
        with torch.device("meta"):
            model = build_language_model(shrink_config(config))
        odd = (type(module).__name__ for module in decoder_of(model).modules() if _is_odd(module))
        found = next((f"weights that no linear layer holds (in {name})" for name in odd), "")
    if found:
        raise ConfigError(
            f"{setting} is for models of attention and linear layers, and {path} "
            f"({config.model_type}) has {found}. {cure}"
        )


def _is_odd(module: nn.Module) -> bool:
    plain = isinstance(module, nn.Linear | nn.Embedding)
    return not plain and any(own.ndim > 1 for own in module.parameters(recurse=False))
