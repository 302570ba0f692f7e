"""Linear layers for vLLM that round to 8 bits when their weights have arrived whole.

vLLM 0.32 quantises the weights of linear layers to fp8 when it reads a folder, to int8 not at all,
and neither can be written box by box. Its kernels can all the same: a layer here has raw weights,
without memory, until they come. When a layer has all of them, from a folder or from the trainer, it
rounds them, gives the result to vLLM's kernel for this device, and drops them. On GPUs what
the kernel has taken keeps its addresses, which CUDA graphs hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import init_fp8_linear_kernel, init_int8_linear_kernel
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
)
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.platforms import current_platform

from hybridrl.quantization.int8_products import Int8Weight
from hybridrl.quantization.rounded_matrix import FP8, INT8, TYPES, Rows, quantize_rows
from hybridrl.rollout.loader_probe import make_zeros_like
from hybridrl.system.device_traits import has_onednn_int8

METHOD_PREFIX = "hybridrl_"
"""Before `int8` and `fp8`: what vLLM knows them by."""
_MIN_CAPABILITY = {INT8: 75, FP8: 89}
"""Of GPUs whose tensor cores multiply such numbers, ten times the compute capability."""
_FIRST_CAPABILITY_WITHOUT_INT8 = 100
"""Blackwell, for which vLLM has no kernels of int8."""
_IDENTITY_ROWS = 1024  # of an identity matrix at a time


class LinearQuantization(QuantizationConfig):
    """A quantization of all linear layers; embeddings and the head stay as they are."""

    kind: str

    def __init__(self) -> None:
        super().__init__()
        if why := explain_unsupported(self.kind):
            raise ValueError(f"rollout.quantization={self.kind}: {why}")

    def get_name(self) -> str:
        return METHOD_PREFIX + self.kind

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        halves = [torch.bfloat16, torch.float16]
        return [*halves, torch.float32] if current_platform.is_cpu() else halves

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # asked above

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LinearQuantization:
        raise ValueError("The model's folder is quantised already; it has to hold whole weights.")

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            raise ValueError(_unfit(self.kind, f"{prefix} holds experts"))
        return QuantizedLinearMethod(self.kind) if isinstance(layer, LinearBase) else None


@register_quantization_config(METHOD_PREFIX + INT8)
class Int8Quantization(LinearQuantization):
    """A quantization that multiplies int8 by int8."""

    kind = INT8


@register_quantization_config(METHOD_PREFIX + FP8)
class Fp8Quantization(LinearQuantization):
    """A quantization that multiplies e4m3 by e4m3."""

    kind = FP8


@register_weight_loader_v2_supported_method
class QuantizedLinearMethod(UnquantizedLinearMethod):
    """The 8-bit method of one linear layer.

    Args:
        kind: `int8` or `fp8`.
    """

    uses_meta_device = True
    """vLLM is told that weights have no memory before they come."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self._taken: nn.Module | None = None
        self._dtype = torch.get_default_dtype()  # vLLM makes a model under its own precision

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            super().create_weights(layer, *args, **kwargs)
        outputs, inputs = layer.weight.shape
        if self.kind == INT8 and current_platform.is_cpu() and not has_onednn_int8("cpu"):
            self._kernel: Any = _ExactInt8Kernel()
        elif self.kind == INT8:
            self._kernel = init_int8_linear_kernel(True, False, True, type(self).__name__)
        else:
            self._kernel = init_fp8_linear_kernel(
                kFp8DynamicTokenSym,
                kFp8StaticChannelSym,
                self._dtype,
                self._dtype,
                (outputs, inputs),
                module_name=type(self).__name__,
            )

    @torch.no_grad()
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        raw = layer.weight
        if not raw.numel():  # vLLM asks once more when all layers are loaded
            return
        if raw.is_meta:  # none came, because they will be written
            raw = make_zeros_like(raw, current_platform.device_type)
        bias = getattr(layer, "bias", None)
        bias = None if bias is None else bias.data
        plain = raw.data.as_subclass(Tensor)  # of which every operation is as usual
        fresh = self._prepared(quantize_rows(plain, self.kind), bias)
        if self._taken is None or raw.device.type == "cpu":
            self._taken = fresh  # kernels of CPUs keep the address of its scales
        else:
            for name, tensor in self._taken.named_parameters():
                tensor.data.copy_(fresh.get_parameter(name))
        layer.weight = nn.Parameter(raw.new_empty(0), requires_grad=False)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._kernel.apply_weights(self._taken, x, bias)

    def _prepared(self, rows: Rows, bias: Tensor | None) -> nn.Module:
        """Return what the kernel computes with, as parameters that loaders do not see. They are no
        part of the model's, for loaders know nothing of them."""
        taken = nn.Module()
        outputs, inputs = rows.values.shape
        taken.logical_widths = [outputs]
        taken.input_size_per_partition, taken.output_size_per_partition = inputs, outputs
        taken.orig_dtype = self._dtype
        taken.input_scale = taken.input_zero_point = taken.azp_adj = None
        taken.bias = bias  # kernels of CPUs with AMX keep it in float32
        values = rows.values if self.kind == INT8 else rows.values.t()
        taken.weight = nn.Parameter(values, requires_grad=False)
        taken.weight_scale = nn.Parameter(rows.scales, requires_grad=False)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)  # that of outputs, to the kernels of CPUs
        try:
            is_exact = isinstance(self._kernel, _ExactInt8Kernel)
            if self.kind == INT8 and current_platform.is_cpu() and not is_exact:
                # Where there is AMX, vLLM would take a kernel that is for outputs of 16 bits, and
                # for a multiple of 32 of them; oneDNN's, which uses AMX too, is for all.
                self._kernel.linear_method = self._kernel._apply_weights_onednn
                self._kernel.process_weights_for_onednn(taken)
            else:
                self._kernel.process_weights_after_loading(taken)
        finally:
            torch.set_default_dtype(before)
        return taken

    def rows(self, outputs: int, inputs: int) -> Rows:
        """Read the kernel's weight ``[outputs, inputs]`` back, as numbers and scales."""
        device = torch.device(current_platform.device_type)
        found = read_linear_weight(
            lambda x: self._kernel.apply_weights(self._taken, x, None), inputs, self._dtype, device
        )
        scales = self._taken.weight_scale.data[:outputs]
        values = found.float() / scales
        return Rows((values.round() if self.kind == INT8 else values).to(TYPES[self.kind]), scales)


def read_linear_weight(
    multiply: Callable[[Tensor], Tensor], inputs: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Read a weight ``[outputs, inputs]`` back from what multiplies by it, by products with rows of
    the identity."""
    found = []
    for start in range(0, inputs, _IDENTITY_ROWS):
        rows = torch.zeros(min(_IDENTITY_ROWS, inputs - start), inputs, dtype=dtype, device=device)
        rows[:, start:].fill_diagonal_(1)
        found.append(multiply(rows))
    return torch.cat(found).T


class _ExactInt8Kernel:
    """A kernel for CPUs on which oneDNN's sums of products overflow."""

    def process_weights_after_loading(self, taken: nn.Module) -> None:
        taken.products = Int8Weight(Rows(taken.weight.data, taken.weight_scale.data))

    def apply_weights(self, taken: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        found = taken.products.multiply(x)
        return found if bias is None else found + bias


def explain_unsupported(kind: str) -> str:
    """Return why this device cannot multiply in 8 bits, with the cure; empty if it can."""
    if current_platform.is_cpu():
        return "" if kind == INT8 else "it needs a GPU. Set rollout.quantization=int8, or none."
    capability = current_platform.get_device_capability()
    if not current_platform.is_cuda() or capability is None:
        return "it needs a GPU of NVIDIA's, or CPUs. Set rollout.quantization=none."
    said = f"this GPU's compute capability is {capability.major}.{capability.minor}"
    number = capability.to_int()
    if number < _MIN_CAPABILITY[kind]:
        least = _MIN_CAPABILITY[kind] / 10
        return f"it needs {least} or more, and {said}. Set rollout.quantization=none."
    if kind == INT8 and number >= _FIRST_CAPABILITY_WITHOUT_INT8:
        return f"vLLM has no such kernels where {said}. Set rollout.quantization=fp8."
    return ""


def check_quantizable(model: nn.Module) -> None:
    """Refuse models whose linear weights others read, as latent attention and recurrent layers do.

    Raises:
        ValueError: names the layer.
    """
    for name, module in model.named_modules():
        odd = isinstance(module, AttentionLayerBase) and not isinstance(module, Attention)
        if odd and (kind := find_quantization(model)):
            raise ValueError(_unfit(kind, f"{name} is a {type(module).__name__}"))


def find_quantization(model: nn.Module) -> str:
    """Return `int8` or `fp8`, or an empty text if no layer is quantized."""
    return next((method.kind for _, method in list_quantized_layers(model)), "")


def list_quantized_layers(model: nn.Module) -> Iterator[tuple[nn.Module, QuantizedLinearMethod]]:
    """Yield the quantized layers with their methods."""
    for module in model.modules():
        if isinstance(method := getattr(module, "quant_method", None), QuantizedLinearMethod):
            yield module, method


def quantize_while_loading(model: nn.Module) -> None:
    """Round each layer as soon as its weights are read; call this before a folder is read."""
    for layer, _ in list_quantized_layers(model):
        initialize_online_processing(layer)


def _unfit(kind: str, why: str) -> str:
    return (
        f"rollout.quantization={kind} is for models of attention and linear layers, and {why}. Set "
        "rollout.quantization=none."
    )
