"""The weights of a vLLM model: written box by box, packed by their layers, and read back.

Where a parameter is used as its loader fills it, which is everywhere on CUDA but in some kernels
for experts, it is written in place: its address, which CUDA graphs hold, stays. The CPU back end
packs the weights of linear layers and of experts and drops the originals, and so do layers that
compute in 8 bits (`rollout.quantization`). There a layer's weights are put together in a raw
buffer, and when all have come the layer's own processing packs them, as when vLLM loads a
checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm._custom_ops import causal_conv1d_weight_pack
from vllm.config import (
    LoadConfig,
    ModelConfig,
    VllmConfig,
    get_current_vllm_config,
    replace,
    set_current_vllm_config,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from hybridrl.layout.boxes import Piece
from hybridrl.quantization.rounded_matrix import dequantize_rows, quantize_rows
from hybridrl.rollout import vllm_quantization
from hybridrl.rollout.loader_probe import (
    LoaderProbeError,
    make_zeros_like,
    probe_loader,
    record_raw_parameters,
)
from hybridrl.rollout.vllm_quantization import QuantizedLinearMethod, read_linear_weight
from hybridrl.rollout.weight_writer import EngineTensor, WeightPieces, WeightWriter

LOAD_FORMAT = "hybridrl"
INCOMING_SHAPES = "coming"
"""The shapes of weights that will be written before anything is generated, in what vLLM hands on to
the loader; none: it is to read them."""
_UNQUANTIZED_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_UNPACKED_BACKENDS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels that take experts as loaders fill them; others swap, shuffle or transpose them."""
_DIGIT_BITS = 8
_log = logging.getLogger(__name__)


@register_model_loader(LOAD_FORMAT)
class RawParameterLoader(DefaultModelLoader):
    """A vLLM loader that records raw parameters and skips a folder that would be overwritten."""

    def __init__(self, load_config: LoadConfig) -> None:
        extra = dict(load_config.model_loader_extra_config)
        self._coming: Mapping[str, tuple[int, ...]] = extra.pop(INCOMING_SHAPES)
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config=extra))

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        vllm_quantization.check_quantizable(model)
        record_raw_parameters(model)
        if self._coming and _fills(model, self._coming):
            for parameter in model.parameters():
                parameter.data.zero_()  # vLLM runs the model once to see how much memory it takes
        else:
            vllm_quantization.quantize_while_loading(model)
            super().load_weights(model, model_config)


def probe_vllm_model(
    model: nn.Module, vllm_config: VllmConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[Piece, ...]]:
    """Probe a model of vLLM's; see `loader_probe.probe_loader`.

    Raises:
        LoaderProbeError: also for layers whose weights are stored in another precision or order.
    """
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if not isinstance(method, QuantizeMethodBase) or isinstance(method, _UNQUANTIZED_METHODS):
            continue
        if isinstance(method, UnquantizedFusedMoEMethod):
            kernel = method.unquantized_backend
            if kernel in _UNPACKED_BACKENDS or kernel is UnquantizedMoeBackend.CPU:
                continue
            raise LoaderProbeError(f"{name} keeps experts in the order of {kernel.value}'s kernels")
        if any(True for _ in module.parameters()):
            raise LoaderProbeError(f"{name} keeps its weights by {type(method).__name__}")
    with set_current_vllm_config(vllm_config):
        return probe_loader(model, shapes)


def _fills(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether boxes of weights of these shapes fill a raw model completely."""
    try:
        probe_vllm_model(model, get_current_vllm_config(), shapes)
    except LoaderProbeError as reason:
        _log.info("vLLM reads its first weights from the model's folder: %s.", reason)
        return False
    return True


class VLLMWeightWriter(WeightWriter):
    """A weight writer for the pieces that `probe_vllm_model` found.

    Args:
        model: The rank's model.
        vllm_config: The engine's.
        pieces: Of this model.
    """

    def __init__(self, model: nn.Module, vllm_config: VllmConfig, pieces: WeightPieces) -> None:
        super().__init__(dict(model.named_parameters()), pieces)
        self._model = model
        self._config = vllm_config
        self._owners = _owners(model)
        self._targets: dict[str, Tensor] = {}  # of the layers that are being written
        self._raw: dict[str, nn.Parameter] = {}  # those of them that take the place of packed ones
        self._sizes = dict(self.missing)
        for tensor in self._parameters:  # those that are all padding here, too
            self.missing.setdefault(tensor, 0)
        self._unfinished = set(self._parameters)

    @torch.no_grad()
    def finish(self) -> None:
        super().finish()
        for tensor in sorted(self._unfinished):  # all padding: nothing was written
            self._target(tensor)
            self._complete(tensor)
        with set_current_vllm_config(self._config):
            for module in self._model.modules():
                process = getattr(module, "process_weights_after_loading", None)
                if process and isinstance(module, AttentionLayerBase):
                    process(self._config.model_config.dtype)  # it may keep products of weights

    def _target(self, tensor: str) -> Tensor:
        if tensor not in self._targets:
            live, raw = self._parameters[tensor], self._model.raw_parameters[tensor]
            packed = any(has_packed_experts(module) for module, _ in self._owners[tensor])
            is_raw = live.shape == raw.shape and live.dtype == raw.dtype
            if is_raw and not packed:
                self._targets[tensor] = live.data
                if self._sizes.get(tensor, 0) < raw.numel():
                    live.data.zero_()  # the padding, which sleeping may have lost
            else:
                self._raw[tensor] = make_zeros_like(raw, live.device)
                self._targets[tensor] = self._raw[tensor].data
        return self._targets[tensor]

    def _complete(self, tensor: str) -> None:
        self._unfinished.discard(tensor)
        done = [
            (module, tensors)
            for module, tensors in self._owners[tensor]
            if self._unfinished.isdisjoint(tensors.values())
        ]
        for module, tensors in done:
            for attribute, name in tensors.items():
                if name in self._raw:
                    setattr(module, attribute, self._raw[name])
            if isinstance(getattr(module, "quant_method", None), _UNQUANTIZED_METHODS):
                with set_current_vllm_config(self._config):
                    module.quant_method.process_weights_after_loading(module)
            elif has_packed_experts(module):
                _kernel(module).process_weights_after_loading(module)
        for _, tensors in done:
            for name in tensors.values():
                self._raw.pop(name, None)
                self._targets.pop(name, None)


def list_engine_tensors(model: nn.Module, tensor: str) -> Iterator[EngineTensor]:
    """Yield a parameter in every form that its layers use, packed and rounded copies too."""
    live, raw = model.get_parameter(tensor), model.raw_parameters[tensor]
    owners = _owners(model)[tensor]
    if live.shape == raw.shape and not any(has_packed_experts(module) for module, _ in owners):
        yield EngineTensor(tensor, live.data.to(raw.dtype))
    for module, tensors in owners:
        if has_packed_experts(module):
            packed = _unpacked(module, tensors, tensor, model)
            yield EngineTensor(f"{tensor}, packed for its kernel,", packed)
        if hasattr(module, "cpu_linear") and tensors.get("weight") == tensor:
            multiply = partial(module.quant_method.apply, module)
            packed = read_linear_weight(multiply, raw.shape[1], raw.dtype, live.device)
            yield EngineTensor(f"{tensor}, packed in a {type(module).__name__},", packed)
        plain = getattr(module, "_cpu_unpacked_conv_weight", None)
        if plain is not None and torch.equal(causal_conv1d_weight_pack(plain), live):
            yield EngineTensor(f"{tensor}, packed for its kernel,", plain.view(raw.shape))
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizedLinearMethod) and tensors.get("weight") == tensor:
            yield EngineTensor(
                f"{tensor}, rounded to {method.kind},",
                dequantize_rows(method.rows(*raw.shape)),
                partial(_rounded, kind=method.kind, dtype=raw.dtype),
            )


def _rounded(weight: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return what an 8-bit layer makes of weights that arrive in precision `dtype`."""
    return dequantize_rows(quantize_rows(weight.to(dtype), kind))


def has_packed_experts(module: nn.Module) -> bool:
    """Return whether a layer of experts keeps them in the order of a CPU's kernels."""
    if not isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
        return False
    kernel = _kernel(module)
    return isinstance(kernel, CPUUnquantizedExperts) and not kernel._use_zentorch


def drop_expert_kernels(model: nn.Module) -> None:
    """Drop the CPU kernels of experts, so that vLLM packs weights again at the next whole load."""
    for module in model.modules():
        if has_packed_experts(module):
            module.quant_method.moe_kernel = None


def _kernel(experts: nn.Module) -> Any:
    kernel = experts.quant_method.moe_kernel
    return None if kernel is None else kernel.fused_experts


def _unpacked(
    experts: nn.Module, tensors: Mapping[str, str], tensor: str, model: nn.Module
) -> Tensor:
    """Return a layer's packed experts in loading order, found by packing the elements' numbers. A
    number goes digit by digit, which any precision can hold."""
    (attribute,) = (name for name, of in tensors.items() if of == tensor)
    packed = getattr(experts, attribute)
    count = model.raw_parameters[tensor].numel()
    numbers = torch.zeros(packed.shape, dtype=torch.int64)
    for digit in range(0, count.bit_length(), _DIGIT_BITS):
        layer = nn.Module()
        for name, of in tensors.items():
            raw = model.raw_parameters[of]
            elements = torch.arange(1, raw.numel() + 1) >> digit & (1 << _DIGIT_BITS) - 1
            values = elements.to(raw.dtype).view(raw.shape)
            layer.register_parameter(name, nn.Parameter(values, requires_grad=False))
        _kernel(experts).process_weights_after_loading(layer)
        numbers += getattr(layer, attribute).long() << digit
    values = packed.new_zeros(count + 1)  # the first is for padding
    values[numbers.flatten()] = packed.flatten()
    return values[1:].view(model.raw_parameters[tensor].shape)


def _owners(model: nn.Module) -> dict[str, list[tuple[nn.Module, dict[str, str]]]]:
    """Return the modules that use each parameter, with the names of all their parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[str, list[tuple[nn.Module, dict[str, str]]]] = {n: [] for n in names.values()}
    for module in model.modules():
        own = {
            attribute: names[id(parameter)]
            for attribute, parameter in module.named_parameters(recurse=False)
        }
        for tensor in own.values():
            owners[tensor].append((module, own))
    return owners
