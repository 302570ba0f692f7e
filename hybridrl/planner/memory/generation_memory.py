"""Bytes of a generator's weights and cache on one device."""

from __future__ import annotations

from hybridrl.models.model_shape import ModelShape
from hybridrl.planner.memory.model_part import FLOAT32_BYTES, MemoryParts
from hybridrl.planner.step.step_calls import StepSizes

_SAMPLING_LOGIT_COPIES = 4
"""Of `[samples, vocabulary]` logits while `rollout=transformers` chooses tokens."""


def generation_copy_bytes(shape: ModelShape, quantization: str = "none") -> float:
    """Return the bytes of the generator's weights on one device: in the precision of computation,
    or with `rollout.quantization` one byte per value of a layer and a scale per row, which is about
    as long as the states between layers are wide."""
    if quantization == "none":
        return float(shape.item * shape.parameters.all)
    layers = shape.layer.all * shape.layers
    rest = shape.item * (shape.parameters.all - layers)
    return rest + layers * (1 + FLOAT32_BYTES / shape.hidden)


def kv_cache_bytes(shape: ModelShape, tokens: float, kv_cache: str = "auto") -> float:
    """Return the bytes of the keys and values of this many tokens on one device.

    Args:
        kv_cache: As `rollout.kv_cache`.
    """
    item = {"fp8": 1, "bf16": 2}.get(kv_cache, shape.item)
    return float(tokens * shape.layers * shape.key_value * item)


def estimate_transformers_generation(shape: ModelShape, sizes: StepSizes, rows: int) -> MemoryParts:
    """Estimate the memory that generating `rows` samples at a time adds with
    `rollout=transformers`."""
    cache = kv_cache_bytes(shape, rows * sizes.sample_tokens)
    prompts = rows * sizes.prompt_tokens * shape.scoring.of(shape.layers)
    choosing = _SAMPLING_LOGIT_COPIES * rows * shape.vocabulary * FLOAT32_BYTES
    # A layer's cache grows by copying; both copies live until the layer is done.
    return {"kv_cache": cache + cache / shape.layers, "activations": max(prompts, choosing)}
