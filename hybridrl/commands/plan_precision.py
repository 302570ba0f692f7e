"""`hybridrl plan precision`: which layers of a role's model a slower device computes in fewer bits,
as a plan that `models.<role>.precision` takes."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.table import Table

from hybridrl.checks.check_list import check
from hybridrl.checks.machine.device_checks import devices_here
from hybridrl.commands.output import print_plan
from hybridrl.commands.plan_options import parse_lengths
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config
from hybridrl.job.job_inputs import load_job_rows, resolve_model_folder
from hybridrl.models.model_loading import load_tokenizer
from hybridrl.planner.computation_dtype import resolve_dtype
from hybridrl.planner.step.step_calls import compute_step_sizes
from hybridrl.system.container_limits import count_usable_cores
from hybridrl.system.formatting import format_seconds
from hybridrl.systems.low_bits.precision_checks import resolve_precision_use
from hybridrl.systems.low_bits.precision_plan import PrecisionPlan
from hybridrl.systems.low_bits.precision_planning import PROBE_TOKENS, make_plan
from hybridrl.systems.unequal_devices import load_unequal_devices
from hybridrl.trainers import load_trainer
from hybridrl.trainers.role_spec import ACTOR_ROLE

_CALIBRATION_ROWS, _CALIBRATION_TOKENS = 16, 512
"""Of calibration: rows of the data, and of each at most so many tokens."""


def run(chosen: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Make the plan of a role and print it, or write it to `--out`.

    Raises:
        ConfigError: for what is wrong with settings, devices or the model.
    """
    config = load_config(overrides)
    check(config)
    role = chosen.role or ACTOR_ROLE
    use, path = resolve_precision_use(config, role)
    if chosen.devices is None:
        raise ConfigError(
            "--devices is not set: it names a JSON file of the devices that the role's ranks have, "
            'such as [{"name": "new"}, {"name": "old", "share": 0.5}].'
        )
    devices = load_unequal_devices(chosen.devices, ("name", "share", "memory_gib", "link_gib_s"))
    cluster = devices_here(config)
    config = resolve_dtype(config, cluster.kind)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, count_usable_cores() // len(devices)))
    try:
        with tempfile.TemporaryDirectory(prefix="hybridrl-plan-") as folder:
            path = path or resolve_model_folder(config, Path(folder))
            sizes = compute_step_sizes(config, parse_lengths(chosen.lengths))
            tokens = min(PROBE_TOKENS, config.actor.tokens_per_microbatch or PROBE_TOKENS)
            samples, device = _read_calibration_tokens(config, path), torch.device(cluster.kind)
            dtype = config.model.dtype
            step = (sizes.tokens, sizes.sample_tokens)
            plan = make_plan(use, path, dtype, *step, samples, devices, device, tokens)
    finally:
        torch.set_num_threads(threads)
    lines = _describe_plan(plan, role, chosen.out)
    print_plan(chosen, plan.to_json(), _build_plan_table(plan), *lines)


def _read_calibration_tokens(config: Config, path: str) -> list[torch.Tensor]:
    """Read token ids of the job's data for calibration."""
    tokenizer = load_tokenizer(config.model.tokenizer or path)
    kind = load_trainer(config.trainer.name).DATA
    rows, _ = load_job_rows(config, kind, tokenizer)
    every = rows.training if rows.examples is None else rows.examples
    batch = every.take(range(min(_CALIBRATION_ROWS, len(every))))
    answers = next((c for c in ("response_ids", "chosen_ids") if c in batch.columns), None)
    prompts = [row[:_CALIBRATION_TOKENS] for row in batch["prompt_ids"].rows()]
    if answers is None:
        return prompts
    both = zip(prompts, batch[answers].rows(), strict=True)
    return [torch.cat([prompt, answer])[:_CALIBRATION_TOKENS] for prompt, answer in both]


def _build_plan_table(plan: PrecisionPlan) -> Table:
    table = Table(title=f"bits of {plan.layers} layers, {plan.use}", title_justify="left")
    for name in ("rank", "device", "share", "layers in fewer bits", "seconds", "whole", "token KL"):
        table.add_column(name)
    kls: Sequence[float] = plan.found["token_kl"]
    for number, rank in enumerate(plan.ranks):
        table.add_row(
            str(number),
            rank.name,
            f"{rank.share:g}",
            _format_layer_bits(rank.bits) or "none",
            f"{rank.seconds:.3g}",
            f"{plan.found['whole_seconds'][number]:.3g}",
            f"{kls[number]:.2g}",
        )
    return table


def _format_layer_bits(bits: Mapping[int, int]) -> str:
    """Format layer numbers by bits: `8 bits: 0, 2; 4 bits: 5`."""
    kinds = sorted(set(bits.values()), reverse=True)
    return "; ".join(
        f"{kind} bits: {', '.join(str(n) for n in sorted(bits) if bits[n] == kind)}"
        for kind in kinds
    )


def _describe_plan(plan: PrecisionPlan, role: str, out: str | None) -> list[str]:
    layer: Mapping[int, float] = plan.found["layer_seconds"]
    tokens = plan.found["measured_tokens"]
    costs = ", ".join(f"{bits} bits {format_seconds(s)}" for bits, s in layer.items())
    found = [f"A layer on {tokens} tokens, measured here: {costs}."]
    slowest = max(rank.seconds or 0.0 for rank in plan.ranks)
    if slowest > 1.001 * plan.found["target_seconds"]:
        found.append(
            f"Even so the slowest takes {format_seconds(slowest)}, and the fastest device with "
            f"whole layers {format_seconds(plan.found['target_seconds'])}."
        )
    found.append(
        f"Run it with models.{role}.precision={out or 'FILE'}" + ("." if out else " (--out FILE).")
    )
    return found
