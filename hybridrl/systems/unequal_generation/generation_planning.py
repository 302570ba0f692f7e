"""Planning generation over unequal devices: measures each kind of device, judges bits by what they
change of the model's own responses, and searches (`plan_search`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.quantization.output_kl import measure_sensitivity, token_kl
from hybridrl.rollout.rollout_engine import SamplingSettings
from hybridrl.rollout.transformers_engine import TokenSampler
from hybridrl.systems.unequal_devices import UnequalDevice
from hybridrl.systems.unequal_generation.cost_probe import (
    compute_model_sizes,
    measure_copy_link,
    measure_phase_costs,
    scale_costs,
)
from hybridrl.systems.unequal_generation.decode_micro_batch import (
    DecodeMicroBatch,
    mark_last_tokens,
)
from hybridrl.systems.unequal_generation.generation_plan import (
    FULL_PRECISION_BITS,
    GENERATION_BITS,
    GenerationPlan,
)
from hybridrl.systems.unequal_generation.generation_problem import (
    GenerationDevice,
    GenerationProblem,
    PhaseCosts,
)
from hybridrl.systems.unequal_generation.plan_search import search_generation_plan

TRIES = 5
"""Plans that are measured, each within a smaller sum of indicators than the one before."""
LOW = tuple(bits for bits in GENERATION_BITS if bits != FULL_PRECISION_BITS)


def build_generation_problem(
    config: Config,
    architecture: PretrainedConfig,
    described: Sequence[UnequalDevice],
    lengths: tuple[int, int],
) -> GenerationProblem:
    """Build the planning problem without indicators; measure each kind of device once."""
    samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
    samples = min(samples, config.rollout.max_sequences)
    rows = sorted({-(-samples // count) for count in (1, 2, 4, 8, 16)})
    costs: dict[str, tuple[PhaseCosts, PhaseCosts]] = {}
    devices: list[GenerationDevice] = []
    for one in described:
        if one.device not in costs:
            where = torch.device(one.device)
            costs[one.device] = measure_phase_costs(
                architecture, config.model.dtype, where, rows, *lengths, make_sampling_step
            )
        prefill, decode = (scale_costs(phase, one.share) for phase in costs[one.device])
        devices.append(GenerationDevice(one.name, one.memory, prefill, decode))
    link = measure_copy_link(torch.device(described[0].device))
    layers = architecture.get_text_config().num_hidden_layers
    return GenerationProblem(
        tuple(devices),
        tuple(tuple(link for _ in devices) for _ in devices),
        tuple(dict.fromkeys(GENERATION_BITS, 0.0) for _ in range(layers)),
        config.rollout.max_kl,
        samples,
        *lengths,
        **compute_model_sizes(architecture, config.model.dtype),
    )


def make_sampling_step(head: nn.Module, states: Tensor) -> Callable[[], object]:
    """Return a function that does what the last stage does after its layers: choose tokens and send
    them."""
    rows, device, endless = len(states), states.device, 1 << 40
    chooser = TokenSampler(
        SamplingSettings(endless), torch.zeros(1, dtype=torch.int64, device=device), None
    )
    group = DecodeMicroBatch([torch.zeros(1)] * rows, range(rows), 0, endless, device)

    def run() -> None:
        tokens, log_probs = chooser.choose(head(states), group.seeds, group.position)
        log_probs.tolist()
        chooser.ends(tokens)
        group.take(mark_last_tokens(tokens, [False] * rows))

    return run


def calibrate_indicators(
    model: PreTrainedModel, answers: Sequence[Tensor]
) -> tuple[dict[int, float], ...]:
    """Return indicators of each layer by bits, scaled so that those of every second layer sum to
    the KL measured with these layers rounded."""
    found = measure_sensitivity(model, answers, LOW)
    scales = {}
    for bits in LOW:
        some = dict.fromkeys(range(0, len(found), 2), bits)
        said = sum(found[layer][bits] for layer in some)
        scales[bits] = token_kl(model, answers, some) / said if said else 1.0
    return tuple(
        {FULL_PRECISION_BITS: 0.0} | {bits: found[layer][bits] * scales[bits] for bits in LOW}
        for layer in range(len(found))
    )


def find_measured_plan(
    problem: GenerationProblem, model: PreTrainedModel, answers: Sequence[Tensor]
) -> GenerationPlan:
    """Return the best plan whose measured KL is at most `problem.max_kl`.

    Raises:
        ConfigError: if none of `TRIES` is.
    """
    budget, kl = problem.max_kl, math.inf
    for _ in range(TRIES):
        plan = search_generation_plan(replace(problem, max_kl=budget))
        kl = token_kl(model, answers, plan.bits) if plan.is_rounded else 0.0
        if kl <= problem.max_kl:
            return replace(plan.renumbered(), kl=kl)
        budget *= 0.95 * problem.max_kl / kl
    raise ConfigError(
        f"rollout.max_kl={problem.max_kl:g}: the last of {TRIES} plans is {kl:.2g} nats a token "
        "off, more than its indicators said. Set a lower rollout.max_kl than you need, or a higher "
        "one than that."
    )
