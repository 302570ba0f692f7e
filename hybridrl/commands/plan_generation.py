"""`hybridrl plan generation`: a plan for `rollout=pipeline`, from a model, prompts and devices."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table

from hybridrl.errors import ConfigError
from hybridrl.system.formatting import readable_bytes, readable_seconds
from hybridrl.system.storage import explain_write_errors
from hybridrl.systems.unequal_generation.generation_plan import BITS, WHOLE, GenerationPlan, to_json

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

    from hybridrl.config.schema import Config
    from hybridrl.systems.unequal_generation.generation_problem import (
        Costs,
        GenerationDevice,
        GenerationProblem,
    )

SAMPLES, SAMPLE_TOKENS = 16, 96
"""With so many samples of the model's own, so long at most, bits are judged."""
TRIES = 5
"""Plans that are measured, each within a smaller sum of indicators than the one before."""
LOW = tuple(bits for bits in BITS if bits != WHOLE)


class Described(NamedTuple):
    """A device as a person describes it.

    Attributes:
        name: For people.
        share: Of what the device here does in a second.
        memory_gib: For weights and KV cache.
        device: Where it is measured, by torch's name.
    """

    name: str
    share: float
    memory_gib: float
    device: str


def run(chosen: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Makes the plan, shows it, and writes it to `--out`, or with `--json` to standard output.

    Raises:
        ConfigError: a sentence that says what is wrong, or what is lacking.
    """
    from hybridrl.job.config_resolution import load_config
    from hybridrl.models import load_config as load_model_config
    from hybridrl.models import load_model, load_tokenizer
    from hybridrl.planner.computation_dtype import kind_here, with_dtype
    from hybridrl.systems.unequal_generation.decoder_stage import check_stages, set_attention

    config = load_config(overrides)
    path = config.model.path
    if path is None or not Path(path).expanduser().is_dir():
        raise ConfigError(
            f"model.path={path}: bits are chosen by what they change of a model's responses, so "
            "set model.path to the folder of the model."
        )
    kind = kind_here(config.devices)
    described = _described(config, chosen.devices, kind)
    architecture = load_model_config(path)
    check_stages(architecture, "hybridrl plan generation", path)
    config = with_dtype(config, kind)
    samples = _samples(config, load_tokenizer(config.model.tokenizer or path))
    model = load_model(path, "float32")
    set_attention(model)
    answers = _answers(model, samples)
    problem = make_problem(config, architecture, described, _lengths(config, chosen, samples))
    problem = replace(problem, indicators=calibrated(model, answers))
    plan = measured_plan(problem, model, answers)
    if chosen.out:
        file = Path(chosen.out).expanduser()
        with explain_write_errors(file):
            file.write_text(to_json(plan) + "\n")
    if chosen.json:
        sys.stdout.write(to_json(plan) + "\n")
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_table(plan, problem))
    for line in _lines(plan, chosen.out):
        console.print(line, highlight=False, markup=False)


def make_problem(
    config: Config,
    architecture: PretrainedConfig,
    described: Sequence[Described],
    lengths: tuple[int, int],
) -> GenerationProblem:
    """What is known of devices and model, without indicators: each kind of device is measured."""
    import torch

    from hybridrl.systems.unequal_generation.cost_probe import (
        copy_link,
        probe_costs,
        slowed,
        with_sizes,
    )
    from hybridrl.systems.unequal_generation.generation_problem import (
        GenerationDevice,
        GenerationProblem,
    )

    samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
    samples = min(samples, config.rollout.max_sequences)
    rows = sorted({-(-samples // count) for count in (1, 2, 4, 8, 16)})
    costs: dict[str, tuple[Costs, Costs]] = {}
    devices: list[GenerationDevice] = []
    for one in described:
        if one.device not in costs:
            where = torch.device(one.device)
            costs[one.device] = probe_costs(
                architecture, config.model.dtype, where, rows, *lengths, choice
            )
        prefill, decode = (slowed(phase, one.share) for phase in costs[one.device])
        devices.append(GenerationDevice(one.name, one.memory_gib * 2**30, prefill, decode))
    link = copy_link(torch.device(described[0].device))
    layers = architecture.get_text_config().num_hidden_layers
    problem = GenerationProblem(
        tuple(devices),
        tuple(tuple(link for _ in devices) for _ in devices),
        tuple(dict.fromkeys(BITS, 0.0) for _ in range(layers)),
        config.rollout.max_kl,
        samples,
        *lengths,
        layer_bytes={},
        cache_bytes=0.0,
        embedding_bytes=0.0,
        head_bytes=0.0,
        state_bytes=0.0,
    )
    return with_sizes(problem, architecture, config.model.dtype)


def choice(head: nn.Module, states: Tensor) -> Callable[[], object]:
    """What the last stage does with its states: tokens are chosen and told."""
    import torch

    from hybridrl.rollout.engine_requests import Sampling
    from hybridrl.rollout.token_sampler import Chooser
    from hybridrl.systems.unequal_generation.decode_micro_batch import Group, marked

    rows, device, endless = len(states), states.device, 1 << 40
    chooser = Chooser(Sampling(endless), torch.zeros(1, dtype=torch.int64, device=device), None)
    group = Group([torch.zeros(1)] * rows, range(rows), 0, endless, device)

    def run() -> None:
        tokens, log_probs = chooser.choose(head(states), group.seeds, group.position)
        log_probs.tolist()
        chooser.ends(tokens)
        group.take(marked(tokens, [False] * rows))

    return run


def calibrated(model: PreTrainedModel, answers: Sequence[Tensor]) -> tuple[dict[int, float], ...]:
    """Indicators of each layer, by bits, so that those of every other layer sum up to the KL that
    was measured with these in so few bits."""
    from hybridrl.systems.low_bits.layer_sensitivity import indicator, token_kl

    found = indicator(model, answers, LOW)
    scales = {}
    for bits in LOW:
        some = dict.fromkeys(range(0, len(found), 2), bits)
        said = sum(found[layer][bits] for layer in some)
        scales[bits] = token_kl(model, answers, some) / said if said else 1.0
    return tuple(
        {WHOLE: 0.0} | {bits: found[layer][bits] * scales[bits] for bits in LOW}
        for layer in range(len(found))
    )


def measured_plan(
    problem: GenerationProblem, model: PreTrainedModel, answers: Sequence[Tensor]
) -> GenerationPlan:
    """The best plan whose KL, measured, is no more than `problem.max_kl`.

    Raises:
        ConfigError: if none of `TRIES` is.
    """
    from hybridrl.systems.low_bits.layer_sensitivity import token_kl
    from hybridrl.systems.unequal_generation.plan_search import plan_generation

    budget, kl = problem.max_kl, math.inf
    for _ in range(TRIES):
        plan = plan_generation(replace(problem, max_kl=budget))
        kl = token_kl(model, answers, plan.bits) if plan.is_rounded else 0.0
        if kl <= problem.max_kl:
            return replace(plan.renumbered(), kl=kl)
        budget *= 0.95 * problem.max_kl / kl
    raise ConfigError(
        f"rollout.max_kl={problem.max_kl:g}: the last of {TRIES} plans is {kl:.2g} nats a token "
        "off, more than its indicators said. Set a lower rollout.max_kl than you need, or a higher "
        "one than that."
    )


def read_devices(path: str) -> list[dict[str, Any]]:
    """The entries of a file of devices.

    Raises:
        ConfigError: says what is wrong with it.
    """
    try:
        data = json.loads(Path(path).expanduser().read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"--devices {path} could not be read as JSON: {error}.") from error
    if not isinstance(data, list) or not data or not all(isinstance(one, dict) for one in data):
        raise ConfigError(
            f"--devices {path}: must be a list of objects with at least one, such as "
            '[{"name": "new"}, {"name": "old", "share": 0.5, "memory_gib": 16}].'
        )
    return data


def _described(config: Config, path: str | None, kind: str) -> list[Described]:
    from hybridrl.checks.machine.device_checks import devices_here
    from hybridrl.planner.machine.device_catalog import present

    cluster = devices_here(config)
    memory = present(cluster).memory / 2**30
    here = len(cluster.devices)
    entries: list[Mapping[str, Any]] = [{} for _ in range(here)]
    if path is not None:
        if not path.endswith(".json"):
            raise ConfigError(
                f"--devices {path}: `hybridrl plan generation` measures devices, so it takes a "
                "JSON file that describes them, and its name has to end with .json."
            )
        entries = read_devices(path)
    found = []
    for number, entry in enumerate(entries):
        who = f"--devices {path}: device {number}"
        if others := sorted(set(entry) - set(Described._fields)):
            known = ", ".join(Described._fields)
            raise ConfigError(f"{who} has `{others[0]}`; what is known is {known}.")
        device = str(entry.get("device", "cpu" if kind == "cpu" else f"{kind}:{number % here}"))
        numbers = [entry.get("share", 1.0), entry.get("memory_gib", memory)]
        for name, value in zip(("share", "memory_gib"), numbers, strict=True):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 < value < math.inf):
                raise ConfigError(f"{who} has {name}={value!r}: must be a number above 0.")
        found.append(Described(str(entry.get("name", device)), *map(float, numbers), device))
    return found


def _lengths(
    config: Config, chosen: argparse.Namespace, prompts: Sequence[Tensor]
) -> tuple[int, int]:
    """Tokens of a prompt and of a response."""
    from hybridrl.commands.plan_options import lengths_of

    if (said := lengths_of(chosen.lengths)) is not None:
        return math.ceil(said.prompt), math.ceil(said.response)
    return max(len(prompt) for prompt in prompts), config.rollout.max_tokens


def _samples(config: Config, tokenizer: Any) -> list[Tensor]:
    """Prompts of the job."""
    from hybridrl.job.job_inputs import load_rows

    rows = load_rows(config, "prompts", tokenizer)[0].training["prompt_ids"].rows()
    if not rows:
        raise ConfigError("data: there is no prompt, and bits are judged by responses to some.")
    return [row.clone() for row in rows[:SAMPLES]]


def _answers(model: PreTrainedModel, prompts: Sequence[Tensor]) -> list[Tensor]:
    """Prompts with what the model answers: KL counts where the policy is."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [
            model.generate(
                prompt[None],
                attention_mask=torch.ones_like(prompt[None]),
                max_new_tokens=SAMPLE_TOKENS,
                **{"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
                use_cache=True,
            )[0]
            for prompt in prompts
        ]


def _table(plan: GenerationPlan, problem: GenerationProblem) -> Table:
    from hybridrl.systems.unequal_generation.generation_problem import memory_of

    table = Table(title="generation")
    for name in ("stage", "device", "layers", *(f"in {bits} bits" for bits in BITS), "memory"):
        table.add_column(name, justify="left" if name == "device" else "right")
    for number, (stage, size) in enumerate(zip(plan.stages, memory_of(problem, plan), strict=True)):
        first = plan.first_layer(number)
        table.add_row(
            *(str(number), stage.name, f"{first}-{first + len(stage.bits) - 1}"),
            *(str(stage.bits.count(bits)) for bits in BITS),
            readable_bytes(size),
        )
    return table


def _lines(plan: GenerationPlan, out: str | None) -> list[str]:
    said = plan.predicted
    lines = [
        f"{said['tokens_per_second']:.0f} tokens/s, as predicted: the prompts take "
        f"{readable_seconds(said['prefill_seconds'])}, all tokens after the first "
        f"{readable_seconds(said['decode_seconds'])}.",
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
