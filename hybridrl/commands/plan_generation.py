"""`hybridrl plan generation`: plan layers and bits of `rollout=pipeline` for unequal devices."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from hybridrl.checks.machine.device_checks import devices_here
from hybridrl.commands.output import print_plan
from hybridrl.commands.plan_options import parse_lengths
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config
from hybridrl.job.job_inputs import load_job_rows
from hybridrl.models.model_loading import load_model, load_model_config, load_tokenizer
from hybridrl.planner.computation_dtype import detect_device_kind, resolve_dtype
from hybridrl.planner.machine.device_catalog import add_device_memory
from hybridrl.system.formatting import format_bytes, format_seconds
from hybridrl.systems.unequal_devices import UnequalDevice, load_unequal_devices
from hybridrl.systems.unequal_generation.decoder_stage import (
    check_decoder_stages,
    set_cached_attention,
)
from hybridrl.systems.unequal_generation.generation_plan import (
    GENERATION_BITS,
    GenerationPlan,
    format_generation_plan,
)
from hybridrl.systems.unequal_generation.generation_planning import (
    build_generation_problem,
    calibrate_indicators,
    find_measured_plan,
)
from hybridrl.systems.unequal_generation.generation_problem import (
    GenerationProblem,
    compute_stage_memory,
)

_CALIBRATION_SAMPLES, _CALIBRATION_TOKENS = 16, 96
"""With so many samples of the model's own, so long at most, bits are judged."""


def run(chosen: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Make the plan and print it, or write it to `--out`, or print JSON with `--json`.

    Raises:
        ConfigError: a sentence that says what is wrong, or what is lacking.
    """
    config = load_config(overrides)
    path = config.model.path
    if path is None or not Path(path).expanduser().is_dir():
        raise ConfigError(
            f"model.path={path}: bits are chosen by what they change of a model's responses, so "
            "set model.path to the folder of the model."
        )
    kind = detect_device_kind(config.devices)
    described = _read_device_descriptions(config, chosen.devices, kind)
    architecture = load_model_config(path)
    check_decoder_stages(architecture, "hybridrl plan generation", path)
    config = resolve_dtype(config, kind)
    samples = _read_prompts(config, load_tokenizer(config.model.tokenizer or path))
    model = load_model(path, "float32")
    set_cached_attention(model)
    answers = _generate_responses(model, samples)
    problem = build_generation_problem(
        config, architecture, described, _resolve_lengths(config, chosen, samples)
    )
    problem = replace(problem, indicators=calibrate_indicators(model, answers))
    plan = find_measured_plan(problem, model, answers)
    lines = _describe_plan(plan, chosen.out)
    print_plan(chosen, format_generation_plan(plan), _build_plan_table(plan, problem), *lines)


def _read_device_descriptions(config: Config, path: str | None, kind: str) -> list[UnequalDevice]:
    """The devices of the file, or those that are here; what the file does not say is as here."""
    cluster = add_device_memory(devices_here(config))
    here, entries = len(cluster.devices), [UnequalDevice("")] * len(cluster.devices)
    if path is not None:
        if not path.endswith(".json"):
            raise ConfigError(
                f"--devices {path}: `hybridrl plan generation` measures devices, so it takes a "
                "JSON file that describes them, and its name has to end with .json."
            )
        entries = load_unequal_devices(path, ("name", "share", "memory_gib", "device"))
    found = []
    for number, one in enumerate(entries):
        device = one.device or ("cpu" if kind == "cpu" else f"{kind}:{number % here}")
        memory = min(one.memory, cluster.memory) if math.isinf(one.memory) else one.memory
        found.append(replace(one, name=one.name or device, device=device, memory=memory))
    return found


def _resolve_lengths(
    config: Config, chosen: argparse.Namespace, prompts: Sequence[Tensor]
) -> tuple[int, int]:
    """Return the tokens of a prompt and of a response, from `--lengths` or the settings."""
    if (said := parse_lengths(chosen.lengths)) is not None:
        return math.ceil(said.prompt), math.ceil(said.response)
    return max(len(prompt) for prompt in prompts), config.rollout.max_tokens


def _read_prompts(config: Config, tokenizer: Any) -> list[Tensor]:
    """Read some of the job's prompts."""
    rows = load_job_rows(config, "prompts", tokenizer)[0].training["prompt_ids"].rows()
    if not rows:
        raise ConfigError("data: there is no prompt, and bits are judged by responses to some.")
    return [row.clone() for row in rows[:_CALIBRATION_SAMPLES]]


def _generate_responses(model: Any, prompts: Sequence[Tensor]) -> list[Tensor]:
    """Sample responses from the model, because KL matters on the policy's own responses."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [
            model.generate(
                prompt[None],
                attention_mask=torch.ones_like(prompt[None]),
                max_new_tokens=_CALIBRATION_TOKENS,
                **{"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
                use_cache=True,
            )[0]
            for prompt in prompts
        ]


def _build_plan_table(plan: GenerationPlan, problem: GenerationProblem) -> Table:
    table = Table(title="generation")
    for name in (
        "stage",
        "device",
        "layers",
        *(f"in {bits} bits" for bits in GENERATION_BITS),
        "memory",
    ):
        table.add_column(name, justify="left" if name == "device" else "right")
    for number, (stage, size) in enumerate(
        zip(plan.stages, compute_stage_memory(problem, plan), strict=True)
    ):
        first = plan.first_layer(number)
        table.add_row(
            *(str(number), stage.name, f"{first}-{first + len(stage.bits) - 1}"),
            *(str(stage.bits.count(bits)) for bits in GENERATION_BITS),
            format_bytes(size),
        )
    return table


def _describe_plan(plan: GenerationPlan, out: str | None) -> list[str]:
    said = plan.predicted
    lines = [
        f"{said['tokens_per_second']:.0f} tokens/s, as predicted: the prompts take "
        f"{format_seconds(said['prefill_seconds'])}, all tokens after the first "
        f"{format_seconds(said['decode_seconds'])}.",
        f"{plan.decode_micro_batches} micro-batches, of which the prompts pass in "
        f"{plan.prefill_pieces} parts.",
        f"KL {plan.kl:.2g} nats a token, measured (indicators said {said['kl']:.2g}).",
    ]
    if out:
        ranks = sorted(plan.stages, key=lambda stage: stage.device)
        lines.append(
            f"Use it on {', '.join(stage.name for stage in ranks)}, in this order, by: rollout="
            f"pipeline rollout.parallel.pp={len(plan.stages)} rollout.plan={out}"
        )
    return lines
