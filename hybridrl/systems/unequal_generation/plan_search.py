"""Layers to stages to bits: an integer program, solved for every order of devices that may matter.

Zhao et al. 2024, "LLM-PQ: Serving LLM on Heterogeneous Clusters with Phase-Aware Partition and
Adaptive Quantization" (arXiv:2403.01136), section 4. There bits are weighed against time; here they
are limited by what reinforcement learning corrects for, the KL of the generator from the trainer.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hybridrl.errors import ConfigError
from hybridrl.system.formatting import format_bytes
from hybridrl.systems.unequal_generation.generation_plan import GenerationPlan
from hybridrl.systems.unequal_generation.generation_problem import (
    GenerationProblem,
    predict_generation_time,
    sum_indicators,
)
from hybridrl.systems.unequal_generation.stage_program import PipelineCandidate, StageProgram

_OPTIMALITY_GAP = 0.01
"""Of the time: a plan is no further from the best one."""
_MICRO_BATCH_COUNTS = (1, 2, 3, 4, 6, 8)
_PREFILL_PIECE_COUNTS = (1, 2, 4)
_MAX_DEVICES = 6
_BOUND_LEVELS = 2
"""How many closer bounds there are than the first; see `StageProgram`."""


def search_generation_plan(
    problem: GenerationProblem,
    *,
    micro_batches: Sequence[int] = _MICRO_BATCH_COUNTS,
    pieces: Sequence[int] = _PREFILL_PIECE_COUNTS,
    gap: float = _OPTIMALITY_GAP,
) -> GenerationPlan:
    """Find the plan that takes least time within memory and KL.

    Args:
        micro_batches, pieces: Of decode and prefill, that are tried.
        gap: Share of the time by which a plan may be worse than the best one.

    Raises:
        ConfigError: if there is none: what is lacking; for indicators that are no numbers.
    """
    for layer, indicators in enumerate(problem.indicators):
        for nats in indicators.values():
            if not 0 <= nats < np.inf:  # of a model whose numbers overflow
                raise ConfigError(
                    f"Among the indicators of layer {layer} there is {nats}: must be finite, and "
                    "at least 0."
                )
    if len(problem.devices) > _MAX_DEVICES:
        raise ConfigError(
            f"Generation is planned over up to {_MAX_DEVICES} devices, and there are "
            f"{len(problem.devices)}. Leave out some, or plan for a part of them."
        )
    best, least = None, np.inf
    programs = [StageProgram(problem, one) for one in _choices(problem, micro_batches, pieces)]
    # The likeliest first, each looked at as closely as is needed to leave it out.
    heap = [(program.fluid_bound(), number, 0) for number, program in enumerate(programs)]
    heapq.heapify(heap)
    closer: dict[object, float | None] = {}
    while heap and heap[0][0] < least * (1 - gap):
        bound, number, looks = heapq.heappop(heap)
        if looks < _BOUND_LEVELS:
            key = programs[number].alike, looks
            if key not in closer:
                closer[key] = programs[number].counted_bound(relaxed=looks == 0)
            if (least_of_it := closer[key]) is not None:
                heapq.heappush(heap, (max(bound, least_of_it), number, looks + 1))
            continue
        found = programs[number].solve(least * (1 - gap), gap)
        if found is not None and (took := predict_generation_time(problem, found).total) < least:
            best, least = found, took
    if best is None:
        raise ConfigError(_what_is_lacking(problem))
    return _described(problem, best)


def _described(problem: GenerationProblem, plan: GenerationPlan) -> GenerationPlan:
    """Return the plan with device names and predictions."""
    seconds = predict_generation_time(problem, plan)
    tokens = problem.samples * problem.response_tokens
    named = (replace(one, name=problem.devices[one.device].name) for one in plan.stages)
    predicted = {
        "prefill_seconds": seconds.prefill,
        "decode_seconds": seconds.decode,
        "tokens_per_second": tokens / seconds.total,
        "kl": sum_indicators(problem, plan),
    }
    return replace(plan, stages=tuple(named), predicted=predicted)


def _choices(
    problem: GenerationProblem, micro_batches: Sequence[int], pieces: Sequence[int]
) -> Iterator[PipelineCandidate]:
    """Yield each order of each selection of devices, once for equal devices, with each division
    into micro-batches."""
    kinds = [_kind(problem, number) for number in range(len(problem.devices))]
    seen = set()
    for size in range(1, min(len(kinds), problem.layers) + 1):
        for order in itertools.permutations(range(len(kinds)), size):
            key = tuple(kinds[number] for number in order)
            if key in seen:
                continue
            seen.add(key)
            for count, parts in itertools.product(micro_batches, pieces):
                # One stage is busy anyhow; several wait for each other with fewer micro-batches.
                if count * parts <= problem.samples or count == parts == 1:
                    yield PipelineCandidate(order, count, parts)


def _kind(problem: GenerationProblem, number: int) -> str:
    """Return a key that is equal for devices that may take each other's place."""
    device, own = problem.devices[number], problem.links[number]
    into = [links[number] for links in problem.links]
    others = sorted(str(link) for place, link in enumerate(own) if place != number)
    others += sorted(str(link) for place, link in enumerate(into) if place != number)
    return str((device.memory, device.prefill, device.decode, others))


def _what_is_lacking(problem: GenerationProblem) -> str:
    """Explain why there is no plan."""
    least = {bits: problem.layer_bytes[bits] + problem.layer_cache for bits in problem.layer_bytes}
    lightest, widest = min(least, key=least.__getitem__), max(least)
    ends = problem.embedding_bytes + problem.head_bytes
    have = sum(device.memory for device in problem.devices)
    need = problem.layers * least[lightest] + ends
    if need > have:
        return (
            f"The model does not fit: with all layers in {lightest} bits, and the KV cache of "
            f"{problem.samples} samples, it takes {format_bytes(need)}, and the devices have "
            f"{format_bytes(have)}. Set a lower rollout.max_sequences or rollout.max_tokens, or "
            "add a device."
        )
    finest = sum(min(one.values()) for one in problem.indicators)
    if finest > problem.max_kl:
        return (
            f"rollout.max_kl={problem.max_kl:.3g}: with all layers in {widest} bits the indicators "
            f"already say {finest:.3g} nats a token. Set a higher one."
        )
    return (
        f"No plan keeps both rollout.max_kl={problem.max_kl:.3g} and the memory of the devices: in "
        f"{widest} bits the model takes {format_bytes(problem.layers * least[widest] + ends)} "
        f"with its KV cache, in {lightest} bits {format_bytes(need)}, and the devices have "
        f"{format_bytes(have)} (a layer is on one of them, whole). Set a higher rollout.max_kl "
        "or a lower rollout.max_sequences, or add a device."
    )
