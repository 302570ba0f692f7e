"""Measure what layers of a model cost while they generate, with the kernels that will do it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from hybridrl.models.language_model import build_language_model
from hybridrl.models.model_shape import compute_model_shape, narrow_config
from hybridrl.system.cluster_spec import LinkSpec
from hybridrl.system.dtypes import DTYPES
from hybridrl.system.timing import measure_seconds
from hybridrl.systems.unequal_generation.decoder_stage import DecoderStage
from hybridrl.systems.unequal_generation.generation_plan import FULL_PRECISION_BITS, GENERATION_BITS
from hybridrl.systems.unequal_generation.generation_problem import CostCurve, PhaseCosts
from hybridrl.systems.unequal_generation.growing_cache import GrowingCache

TokenChoice = Callable[[nn.Module, Tensor], Callable[[], object]]
_PROBED_DEPTHS = (1, 3)
"""Layers of the stages that are timed: what the second has more is layers alone."""
_MIN_TURNS, _MIN_SECONDS = 5, 0.2
"""A measurement repeats at least so often, and at least so long."""
_CACHE_FLUSH_BYTES = 64 << 20
"""More than caches hold."""
_SCALE_BYTES_PER_VALUE = {8: 0.0, 4: 0.5 / 8}
"""Beside a value: float32 scales, one for each 64 values of 4 bits; of rows in 8 bits few."""


def measure_phase_costs(
    config: PretrainedConfig,
    dtype: str,
    device: torch.device,
    rows: Sequence[int],
    prompt_tokens: int,
    response_tokens: int,
    choice: TokenChoice,
    bits: Sequence[int] = GENERATION_BITS,
) -> tuple[PhaseCosts, PhaseCosts]:
    """Measure the costs of prefill and of decode on this device, with random weights.

    Args:
        config: Of the model, whose last layers' kinds are measured.
        dtype: Name of the precision of computation.
        rows: Samples in a micro-batch, that are measured.
        prompt_tokens, response_tokens: Of a sample; decode is measured half-way.
        choice: Given head and last states, what a last stage does with them.
    """
    few = narrow_config(config, 1, _PROBED_DEPTHS[1] + 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_language_model(few, dtype=DTYPES[dtype]).eval()
    layer: dict[bool, dict[int, list[tuple[int, float]]]] = {True: {}, False: {}}
    stage: dict[bool, list[tuple[int, float]]] = {True: [], False: []}
    for number in bits:
        pair = [
            DecoderStage(copy.deepcopy(model), None, 0, [number] * depth, DTYPES[dtype], device)
            for depth in _PROBED_DEPTHS
        ]
        for count in sorted(set(rows)):
            for prefill in (True, False):
                tokens = prompt_tokens if prefill else 1
                before = 0 if prefill else prompt_tokens + response_tokens // 2
                low, high = _timed(
                    [_pass(one, count, tokens, before, device) for one in pair], device
                )
                cost = max(0.0, (high - low) / (_PROBED_DEPTHS[1] - _PROBED_DEPTHS[0]))
                layer[prefill].setdefault(number, []).append((count, cost))
                if number == max(bits):
                    stage[prefill].append((count, max(0.0, low - _PROBED_DEPTHS[0] * cost)))
    head = model.get_output_embeddings().to(device)
    ends, hidden = [], few.get_text_config().hidden_size
    for count in sorted(set(rows)):
        states = torch.randn(count, hidden, dtype=DTYPES[dtype], device=device)
        ends.append((count, _timed([choice(head, states)], device)[0]))
    found = [
        PhaseCosts(
            {number: _growing(points) for number, points in layer[prefill].items()},
            _growing(ends),
            _growing(stage[prefill]),
        )
        for prefill in (True, False)
    ]
    return found[0], found[1]


def scale_costs(costs: PhaseCosts, share: float) -> PhaseCosts:
    """Scale costs to a device that does `share` of the measured work per second."""

    def longer(curve: CostCurve) -> CostCurve:
        return tuple((rows, seconds / share) for rows, seconds in curve)

    layer = {bits: longer(curve) for bits, curve in costs.layer.items()}
    return replace(costs, layer=layer, head=longer(costs.head), stage=longer(costs.stage))


def compute_model_sizes(config: PretrainedConfig, dtype: str) -> dict[str, Any]:
    """Return the bytes of a model, by the names that `GenerationProblem` has for them."""
    shape = compute_model_shape(config, dtype)
    layer = float(shape.layer.all)
    sizes = {
        bits: layer * (bits / 8 + _SCALE_BYTES_PER_VALUE[bits])
        for bits in GENERATION_BITS
        if bits != FULL_PRECISION_BITS
    }
    return {
        "layer_bytes": sizes | {FULL_PRECISION_BITS: layer * shape.item},
        "cache_bytes": float(shape.key_value * shape.item),
        "embedding_bytes": float(shape.embedding.all * shape.item),
        "head_bytes": float((shape.head.all + shape.norm.all) * shape.item),
        "state_bytes": float(shape.hidden * shape.item),
    }


def measure_copy_link(device: torch.device) -> LinkSpec:
    """Measure the cost of messages between devices of one machine, at the rate of memory copies."""
    sizes = (1 << 12, 1 << 24)
    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    low, high = _timed([block.clone for block in blocks], device)
    per_byte = max(1e-18, (high - low) / (sizes[1] - sizes[0]))
    return LinkSpec(1 / (2 * per_byte), _GLOO_LATENCY_S)


_GLOO_LATENCY_S = 2e-4
"""Of a message between two processes of a machine, with gloo."""


def _pass(
    stage: DecoderStage, rows: int, tokens: int, before: int, device: torch.device
) -> Callable[[], object]:
    """Return a function that runs `tokens` tokens of each sample after the `before` tokens in the
    cache."""
    ids = torch.zeros(rows, before + tokens, dtype=torch.int64, device=device)
    positions = torch.arange(before + tokens, device=device).expand(rows, -1)
    cache = GrowingCache(stage.layers, rows)
    if before:
        _fill(stage, cache, rows, before, device)

    def run() -> Tensor:
        for layer in cache.growing:
            layer.length = before
        found: Tensor = stage(ids[:, before:], None, None, positions[:, before:], cache)
        return found

    return run


def _fill(
    stage: DecoderStage, cache: GrowingCache, rows: int, tokens: int, device: torch.device
) -> None:
    """Fill the cache with zeros: its content does not change the time."""
    with torch.inference_mode():
        one = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        stage(one, None, None, one, cache)
        for layer in cache.growing:
            assert layer.keys is not None
            _, heads, _, width = layer.keys.shape
            states = layer.keys.new_zeros(rows, heads, tokens - 1, width)
            layer.update(states, states)


def _growing(points: Sequence[tuple[int, float]]) -> CostCurve:
    """Make the times of a curve non-decreasing: a time above that of more rows was a
    disturbance."""
    later = [seconds for _, seconds in points]
    return tuple((rows, min(later[n:])) for n, (rows, _) in enumerate(points))


@torch.inference_mode()
def _timed(runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Seconds of each, with caches that hold something else: the layers of a model that is worth
    dividing do not fit into them."""
    others = torch.zeros(_CACHE_FLUSH_BYTES, dtype=torch.uint8, device=device)
    return measure_seconds(
        runs, device, turns=_MIN_TURNS, least=_MIN_SECONDS, between=lambda: others.add_(1)
    )
