"""A few seconds of measuring: what a decoder layer takes of this device in each precision.

Some layers of the job's own architecture run in samples as long as the job's, as scoring and
training run them, with the kernels that will run: what rounding and casts cost is in it. A model
without layers tells what the ends take: embedding, head and log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from hybridrl.batch.batch import Batch
from hybridrl.models.language_model import build_language_model
from hybridrl.models.model_shape import narrow_config
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.models.packed_samples import PackedSamples
from hybridrl.quantization.low_bit_linear import apply_layer_bits
from hybridrl.system.dtypes import DTYPES
from hybridrl.system.timing import measure_seconds
from hybridrl.systems.low_bits.low_bit_training import enable_low_bit_training
from hybridrl.systems.low_bits.precision_plan import DTYPE_BITS, SCORING

_PROBED_LAYERS = 2
_MIN_SECONDS = 0.3
"""Of each measurement, at least."""


@dataclass(frozen=True)
class LayerTimings:
    """The measured seconds of one layer by bits, and of everything outside the layers."""

    layer: dict[int, float]
    ends: float
    tokens: int


def measure_layer_timings(
    config: PretrainedConfig,
    dtype: str,
    use: str,
    bits: Sequence[int],
    *,
    tokens: int,
    length: int,
    device: torch.device,
) -> LayerTimings:
    """Measure a decoder layer in full precision and in each number of bits.

    Args:
        dtype: Name of the precision of what is whole, which is measured, too.
        use: `scoring` or `training`.
        bits: Below those of `dtype`.
        tokens: Of a micro-batch, prompts included, about.
        length: Of a sample.
    """
    whole = DTYPE_BITS[dtype]
    few = max(2, length)
    count = max(1, round(tokens / few))
    batch = _samples(config.get_text_config().vocab_size, count, few)
    runs = [_run(config, dtype, use, batch, device, 0, whole)]
    runs += [_run(config, dtype, use, batch, device, _PROBED_LAYERS, b) for b in (whole, *bits)]
    ends, *others = measure_seconds(runs, device, least=_MIN_SECONDS)
    layer = {
        b: max(1e-9, (seconds - ends) / _PROBED_LAYERS)
        for b, seconds in zip((whole, *bits), others, strict=True)
    }
    return LayerTimings(layer, ends, count * few)


def _samples(vocabulary: int, count: int, length: int) -> Batch:
    half = length // 2
    ids = torch.randint(vocabulary, (count, length))
    return Batch.from_columns(
        {"prompt_ids": list(ids[:, : length - half]), "response_ids": list(ids[:, length - half :])}
    )


def _run(
    config: PretrainedConfig,
    dtype: str,
    use: str,
    batch: Batch,
    device: torch.device,
    layers: int,
    bits: int,
) -> Callable[[], object]:
    """Return a function that runs a forward of this many layers, all in these bits, and a backward
    if it trains."""
    with device, torch.random.fork_rng(devices=[]):
        model = build_language_model(
            narrow_config(config, 1, layers),
            dtype=DTYPES[dtype],
            attn_implementation=PACKED_ATTENTION,
        )
    policy = CausalPolicy(model)
    chosen = dict.fromkeys(range(layers), bits) if bits < DTYPE_BITS[dtype] else {}
    samples = PackedSamples.of(batch, device)
    if use == SCORING:
        apply_layer_bits(policy.requires_grad_(False).inner, chosen, DTYPE_BITS[dtype])

        @torch.no_grad()
        def once() -> object:
            return policy(samples)

        return once
    enable_low_bit_training(policy.inner, chosen)

    def once_and_back() -> None:
        policy(samples)["log_probs"].sum().backward()
        policy.zero_grad()

    return once_and_back
