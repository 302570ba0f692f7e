"""The problem of planning generation over unequal devices, and the predicted time of a plan.

The layers of a decoder cost the same, so costs are those of one layer, on each device, in each
number of bits and in both phases: the pass over prompts (prefill), and one token for each sample
(decode).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybridrl.system.cluster_spec import LinkSpec
from hybridrl.systems.unequal_generation.generation_plan import GenerationPlan

CostCurve = tuple[tuple[int, float], ...]
"""Seconds by the number of samples in a micro-batch, which grow; between two of them a line."""


@dataclass(frozen=True)
class PhaseCosts:
    """The measured costs of one phase (prefill or decode) on one device.

    Attributes:
        layer: Of one layer, by bits.
        head: Of norm, head and the choice of tokens.
        stage: Of what a stage does besides its layers: masks, positions, messages.
    """

    layer: Mapping[int, CostCurve]
    head: CostCurve
    stage: CostCurve


@dataclass(frozen=True)
class GenerationDevice:
    """A device for stages, with its memory and its costs in each phase.

    Attributes:
        name: For people.
        memory: Bytes for weights and KV cache.
        prefill, decode: Seconds.
    """

    name: str
    memory: float
    prefill: PhaseCosts
    decode: PhaseCosts


@dataclass(frozen=True)
class GenerationProblem:
    """The devices, links, model sizes and limits that a generation plan is made for.

    Attributes:
        devices: Those that there are; a plan may leave some out.
        links: From one device to another, by their numbers.
        indicators: Of each layer, by bits: nats of KL a token; see `quantization.output_kl`.
        max_kl: Most of all layers together.
        samples: That are generated at a time.
        prompt_tokens, response_tokens: Of a sample.
        layer_bytes: Weights of a layer, by bits.
        cache_bytes: Of the KV cache of a layer, for a token.
        embedding_bytes, head_bytes: On the first and the last stage.
        state_bytes: What travels of a token between stages.
    """

    devices: tuple[GenerationDevice, ...]
    links: tuple[tuple[LinkSpec, ...], ...]
    indicators: tuple[Mapping[int, float], ...]
    max_kl: float
    samples: int
    prompt_tokens: int
    response_tokens: int
    layer_bytes: Mapping[int, float]
    cache_bytes: float
    embedding_bytes: float
    head_bytes: float
    state_bytes: float

    @property
    def layers(self) -> int:
        return len(self.indicators)

    @property
    def layer_cache(self) -> float:
        """Return the bytes of one layer's KV cache for all samples."""
        return self.cache_bytes * self.samples * (self.prompt_tokens + self.response_tokens)


class GenerationTime(NamedTuple):
    """The predicted seconds of a plan: of prefill over all prompts, and of decode for all tokens
    after the first."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


def interpolate_seconds(curve: CostCurve, rows: float) -> float:
    """Interpolate a cost curve at a number of samples; beyond its ends the line goes on, but never
    below 0."""
    if len(curve) == 1:
        return curve[0][1]
    place = min(max(1, bisect_left(curve, (rows, 0.0))), len(curve) - 1)
    (low, before), (high, after) = curve[place - 1], curve[place]
    return max(0.0, before + (after - before) * (rows - low) / (high - low))


class StageCosts(NamedTuple):
    """The costs of each stage in one phase, for one order of devices.

    Attributes:
        layer: By stage and bits.
        fixed: By stage: all but the layers.
        link: After each stage, the last one's to the first: tokens.
    """

    layer: list[dict[int, float]]
    fixed: list[float]
    link: list[float]


def compute_stage_costs(
    problem: GenerationProblem, order: Sequence[int], micro_batches: int, prefill: bool
) -> StageCosts:
    """Compute the seconds of one micro-batch on each stage and link."""
    rows, last = -(-problem.samples // micro_batches), len(order) - 1  # of the largest
    tokens = rows * (problem.prompt_tokens if prefill else 1)
    found = StageCosts([], [], [])
    for number, device in enumerate(order):
        costs = problem.devices[device].prefill if prefill else problem.devices[device].decode
        found.layer.append(
            {bits: interpolate_seconds(curve, rows) for bits, curve in costs.layer.items()}
        )
        head = interpolate_seconds(costs.head, rows) if number == last else 0.0
        found.fixed.append(interpolate_seconds(costs.stage, rows) + head)
        link = problem.links[device][order[(number + 1) % len(order)]]
        size = tokens * problem.state_bytes if number < last else 8 * rows
        found.link.append(link.latency + size / link.bandwidth if last else 0.0)
    return found


def predict_generation_time(problem: GenerationProblem, plan: GenerationPlan) -> GenerationTime:
    """Predict how long a plan takes for all samples.

    With S stages, m micro-batches and n tokens: prefill is a pipeline that fills once, ``sum_s P_s
    + (m p - 1) max_s P_s`` with p pieces of each micro-batch. In decode a micro-batch's next token
    begins when its last one has come back, so a round of all takes ``R = max(m max_s D_s, sum_s
    D_s)``, and n - 1 of them ``(n - 2) R + (m - 1) max_s D_s + sum_s D_s``: where the stages are
    always busy that is ``sum_s D_s + (m (n - 1) - 1) max_s D_s``. (Zhao et al. 2024, "LLM-PQ",
    arXiv:2403.01136, equation 3, has the slowest stage ``(m - 1)(n - 1)`` times, as if the pipeline
    ran empty after every token.) What a link takes counts as a stage does, for it sends while they
    compute.
    """
    order = [stage.device for stage in plan.stages]
    decode, pieces = plan.decode_micro_batches, plan.prefill_pieces
    prefilled = _times(compute_stage_costs(problem, order, decode * pieces, True), plan)
    prefill = sum(prefilled) + (decode * pieces - 1) * max(prefilled)
    times = _times(compute_stage_costs(problem, order, decode, False), plan)
    return GenerationTime(prefill, predict_decode_seconds(times, decode, problem.response_tokens))


def predict_decode_seconds(times: Sequence[float], micro_batches: int, tokens: int) -> float:
    """Predict the seconds of all tokens after the first; see `predict_generation_time`."""
    if tokens < 2:
        return 0.0
    slowest, whole = max(times), sum(times)
    rounds = max(micro_batches * slowest, whole)
    return (tokens - 2) * rounds + (micro_batches - 1) * slowest + whole


def compute_stage_memory(problem: GenerationProblem, plan: GenerationPlan) -> list[float]:
    """Compute the bytes of each stage: weights, KV cache, embedding and head."""
    found = []
    for number, stage in enumerate(plan.stages):
        size = sum(problem.layer_bytes[bits] + problem.layer_cache for bits in stage.bits)
        size += problem.embedding_bytes if number == 0 else 0.0
        size += problem.head_bytes if number == len(plan.stages) - 1 else 0.0
        found.append(size)
    return found


def sum_indicators(problem: GenerationProblem, plan: GenerationPlan) -> float:
    """Sum the indicators of a plan's layers, in nats per token."""
    return sum(problem.indicators[layer].get(bits, 0.0) for layer, bits in plan.bits.items())


def _times(costs: StageCosts, plan: GenerationPlan) -> list[float]:
    """Return the seconds of all stages and links."""
    stages: list[Any] = list(zip(plan.stages, costs.layer, costs.fixed, strict=True))
    return [
        *(sum(layer[bits] for bits in stage.bits) + fixed for stage, layer, fixed in stages),
        *costs.link,
    ]
