"""The frozen base of adapters in 4 bits: NF4 with double quantization (Dettmers et al. 2023,
"QLoRA", arXiv:2305.14314, section 3).

Of 64 neighbours of a weight each is the nearest of 16 quantiles of the normal distribution, times
the largest of them. These largest numbers, less their mean, are in 8 bits. A layer brings its
weight back for each product, in the forward and again in the backward, and keeps nothing whole.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridrl.compress.dynamic_codes import BLOCK, BlockCodes, encode_blocks
from hybridrl.errors import ConfigError
from hybridrl.models.lora import find_frozen_linears
from hybridrl.models.meta_model import read_whole_parameter
from hybridrl.models.stored_tensors import remove_adapter_prefix
from hybridrl.quantization.low_bit_linear import LowBitLinear
from hybridrl.quantization.rounded_matrix import AT_A_TIME

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hybridrl.checkpoint.tensors.tensor_reader import TensorReader

NF4_BLOCK = 64
"""Weights that share a scale."""
NF4_BYTES = 0.5 + (1 + 4 / BLOCK) / NF4_BLOCK
"""Of a weight, with its share of the scales."""
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of appendix E: quantiles of the normal distribution, scaled to 1, with an exact 0."""

_BUFFERS = ("codes", "scale_codes", "scale_scales", "scale_mean")


class NF4Linear(LowBitLinear):
    """A frozen linear layer with a weight in NF4, which passes gradients on to its input. Its codes
    are buffers: they move with the model, FSDP does not shard them, and no file has them."""

    bits = 4
    codes: Tensor
    scale_codes: Tensor
    scale_scales: Tensor
    scale_mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _FrozenProduct.apply(x, self)  # type: ignore[no-untyped-call]
        return product

    def dequantised(self) -> Tensor:
        scales = BlockCodes(self.scale_codes, self.scale_scales, signed=True).decode()
        scales = scales.view(-1).add_(self.scale_mean)
        values = F.embedding(self.codes.int(), _level_pairs(self.codes.device)).view(-1)
        whole = len(values) // NF4_BLOCK * NF4_BLOCK
        values[:whole].view(-1, NF4_BLOCK).mul_(scales[: whole // NF4_BLOCK, None])
        values[whole:].mul_(scales[-1])
        return values[: self.in_features * self.out_features].view(self.out_features, -1)

    def _take(self, weight: Tensor) -> None:
        values = weight.reshape(-1)
        blocks = F.pad(values, (0, -len(values) % NF4_BLOCK)).view(-1, NF4_BLOCK)
        levels = torch.tensor(NF4_LEVELS, device=weight.device)
        largest, codes = [], []
        for part in blocks.split(AT_A_TIME // NF4_BLOCK):
            scale = part.float().abs().amax(1, keepdim=True)
            units = torch.where(scale == 0, 0.0, part.float() / scale)
            found = torch.bucketize(units, (levels[1:] + levels[:-1]) / 2, out_int32=True)
            first, second = found.to(torch.uint8).view(-1, 2).unbind(1)
            largest.append(scale.view(-1))
            codes.append(first << 4 | second)
        mean = torch.cat(largest).mean()
        scales = encode_blocks(torch.cat(largest)[None] - mean, signed=True)
        codes_of_all = torch.cat(codes)[: -(-len(values) // 2)]
        kept = zip(_BUFFERS, (codes_of_all, scales.codes, scales.scales, mean), strict=True)
        for name, tensor in kept:
            self.register_buffer(name, tensor, persistent=False)


class _FrozenProduct(torch.autograd.Function):
    """A product with a weight that is made for it; autograd would keep the weight that it saw."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantised().to(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.layer.dequantised().to(gradient.dtype), None


@cache
def _level_pairs(device: torch.device) -> Tensor:
    """Return the two levels of each byte, ``[256, 2]``: the first has its upper four bits."""
    levels = torch.tensor(NF4_LEVELS, device=device)
    return torch.cartesian_prod(levels, levels)


@torch.no_grad()
def quantize_base(
    model: PreTrainedModel, files: TensorReader | None, device: torch.device | None = None
) -> None:
    """Bring the weights of the decoder's frozen linear layers to NF4, in place. Embeddings and
    heads stay, and so do experts that are one parameter together.

    Args:
        model: With adapters, which stay, too.
        files: Weights that are on the meta device are read from them, one at a time.
        device: Where the codes are to be; None: where the weights are.

    Raises:
        ConfigError: if a weight is not finite. The guard against NaN sees no weights in codes.
    """
    names = {module: name for name, module in model.named_modules()}
    for linear in find_frozen_linears(model):
        weight, name = linear.weight, f"{names[linear]}.weight"
        if weight.is_meta and files is not None:
            weight = read_whole_parameter(model, name, files)
        linear.weight = nn.Parameter(weight.detach().to(device), requires_grad=False)
        layer = NF4Linear(linear)
        if not layer.scale_mean.isfinite():
            raise ConfigError(
                f"The weight `{remove_adapter_prefix(name)}` has values that are not finite, of "
                "which actor.lora.base_format=nf4 would make a whole layer of NaN; no training can "
                "mend them in another format either. The model's files are damaged: copy them "
                "again, or take another model (model.path)."
            )
        model.set_submodule(names[linear], layer)
