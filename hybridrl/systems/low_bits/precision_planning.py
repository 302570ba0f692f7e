"""The plan of a role whose ranks have unequal devices: measures what a layer takes here in each
precision and what fewer bits change of the model's answers, chooses (`bit_allocation`), and
measures what the choice changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hybridrl.models.model_loading import load_model, load_model_config
from hybridrl.quantization.low_bit_linear import find_decoder_layers
from hybridrl.quantization.output_kl import measure_sensitivity, token_kl
from hybridrl.systems.low_bits.bit_allocation import DeviceWorkload, LayerCost, allocate_bits
from hybridrl.systems.low_bits.layer_timings import LayerTimings, measure_layer_timings
from hybridrl.systems.low_bits.precision_plan import (
    DTYPE_BITS,
    SCORING,
    TRAINING,
    PrecisionPlan,
    RankPrecision,
)
from hybridrl.systems.unequal_devices import UnequalDevice

PROBE_TOKENS = 2048
"""Of the probe at most: what more tokens take grows with them."""
STATE = 16
"""Bytes of a parameter that is trained: weight, gradient and two moments."""


def make_plan(
    use: str,
    path: str,
    dtype: str,
    step_tokens: int,
    length: float,
    samples: Sequence[torch.Tensor],
    devices: Sequence[UnequalDevice],
    device: torch.device,
    tokens: int = PROBE_TOKENS,
) -> PrecisionPlan:
    """Make the precision plan of a role whose ranks have these devices.

    Args:
        use: `scoring` or `training`.
        path: Model folder.
        dtype: Name of the precision of what is whole.
        step_tokens: Of all samples of a step.
        length: Tokens of a sample.
        samples: Token ids to measure changes with.
        device: To measure on.
        tokens: Of the probe's micro-batch, at most.
    """
    whole = DTYPE_BITS[dtype]
    low = [bits for bits in ((16, 8, 4) if use == SCORING else (16, 8)) if bits < whole]
    seconds = measure_layer_timings(
        load_model_config(path),
        dtype,
        use,
        low,
        tokens=min(tokens, step_tokens),
        length=round(length),
        device=device,
    )
    model = load_model(path, dtype).requires_grad_(False).eval()
    nn.Module.to(model, device)
    harm = measure_sensitivity(model, samples, low)
    work = _work(model, use, seconds, step_tokens / len(devices), devices)
    found = allocate_bits(work, devices, harm)
    lowered = [{n: b for n, b in enumerate(bits) if b < whole} for bits in found.bits]
    ranks = [
        RankPrecision(bits, d.name, d.share, s)
        for d, bits, s in zip(devices, lowered, found.seconds, strict=True)
    ]
    said: dict[str, Any] = {
        "model": path,
        "tokens": step_tokens // len(devices),
        "target_seconds": found.target,
        "whole_seconds": [work.seconds([whole] * len(work.layers), d.share) for d in devices],
        "layer_seconds": seconds.layer,
        "ends_seconds": seconds.ends,
        "measured_tokens": seconds.tokens,
        "indicators": harm,
        "token_kl": [token_kl(model, samples, bits, whole) if bits else 0.0 for bits in lowered],
    }
    return PrecisionPlan(use, len(work.layers), dtype, ranks, said)


def _work(
    model: Any,
    use: str,
    seconds: LayerTimings,
    tokens: float,
    devices: Sequence[UnequalDevice],
) -> DeviceWorkload:
    """Build the work of a rank in one step, for an equal share of its tokens."""
    times = tokens / seconds.tokens
    layers, whole = find_decoder_layers(model), max(seconds.layer)
    parameters = sum(p.numel() for p in model.parameters())
    inside = sum(p.numel() for p in layers.parameters())
    size = STATE if use == TRAINING else 4
    fixed = 0.0
    if use == TRAINING and len(devices) > 1:  # weights are gathered, gradients are summed
        moved = parameters * (whole / 8 + 4) * (len(devices) - 1) / len(devices)
        fixed = moved / min(d.link for d in devices)
    return DeviceWorkload(
        [
            {
                bits: LayerCost(
                    taken * times,
                    (size if use == TRAINING or bits == whole else bits / 8)
                    * sum(p.numel() for p in layer.parameters()),
                )
                for bits, taken in seconds.layer.items()
            }
            for layer in layers
        ],
        seconds.ends * times,
        fixed,
        size * (parameters - inside),
    )
