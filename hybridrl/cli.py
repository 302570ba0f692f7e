"""The command `hybridrl`: what is no training run. `hybridrl plan [key=value ...]` says where roles
will live, what that takes of each device, and how long a step will last; it starts nothing.
`hybridrl plan precision` says which layers a slower device computes in fewer bits, `hybridrl plan
generation` how unequal devices generate together.
`hybridrl checkpoint` looks at the checkpoints of runs, `hybridrl cluster` at devices and links;
`hybridrl report` and `hybridrl watch` show a run in a browser, `hybridrl top` in a terminal;
`hybridrl timeline` says what each of its devices did and waited for, `hybridrl whatif` how long a
step of it would take if something were different."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hybridrl import __version__
from hybridrl.commands import calibrate, checkpoint, cluster, report, timeline, top, watch, what_if
from hybridrl.errors import ConfigError, HybridRLError, Problems

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hybridrl.config.schema import Config
    from hybridrl.core.cluster import Cluster
    from hybridrl.planner.plan import Plan
    from hybridrl.planner.rates import Rates

FURTHER_PLANS = {
    "generation": "hybridrl.plan_generation",
    "precision": "hybridrl.plan_precision",
}
"""What else `hybridrl plan` makes, by the first word after it, and the module whose `run` does."""
COMMANDS = {
    "calibrate": calibrate,
    "checkpoint": checkpoint,
    "cluster": cluster,
    "report": report,
    "timeline": timeline,
    "top": top,
    "watch": watch,
    "whatif": what_if,
}
"""Other subcommands, and the module whose `run` does each."""
REFUSED = 2
"""Exit code for wrong settings and for what does not fit, as of `python -m hybridrl.main`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="hybridrl", description=__doc__)
    parser.add_argument("--version", action="version", version=f"hybridrl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan",
        help="what a job will do and take, before it starts",
        usage="hybridrl plan [generation | precision] [key=value ...] [--json] [--devices N] "
        "[--lengths P+R] [--role ROLE] [--out FILE] [--search] [--price ...] "
        "[--within SECONDS] [--backtest RUN ...]",
    )
    plan.add_argument(
        "--json", action="store_true", help="the plan as data; placement=file runs it"
    )
    plan.add_argument(
        "--devices",
        help="plan for machines that are not here: 64xH200, 16x8xH100, 8xL4,16xH100@400Gbps, or a "
        "JSON file of `hybridrl cluster probe`. For `precision` and `generation` a JSON file of "
        'unequal ones: [{"name": "new"}, {"name": "old", "share": 0.5, "memory_gib": 16}]',
    )
    plan.add_argument(
        "--lengths",
        metavar="PROMPT+RESPONSE",
        help="tokens of a usual sample, such as 300+800; else the longest that are allowed",
    )
    plan.add_argument("--role", help="for `precision`: whose layers; else the actor's")
    plan.add_argument(
        "--out", metavar="FILE", help="for `generation`, `precision`, --search: where the plan goes"
    )
    plan.add_argument(
        "--search",
        action="store_true",
        help="look for the placement, the cuts and the settings with which the job is quickest",
    )
    plan.add_argument(
        "--price",
        metavar="NAME=DOLLARS",
        help="with --search: what most tokens a dollar are made with; dollars an hour of each kind "
        "of device: H100=2.5,L4=0.7",
    )
    plan.add_argument(
        "--within",
        metavar="SECONDS",
        type=float,
        help="with --search: the fewest devices with which a step takes no longer",
    )
    plan.add_argument(
        "--deadline", metavar="SECONDS", type=float, help="with --search: the best so far then (60)"
    )
    plan.add_argument(
        "--backtest",
        metavar="RUN",
        nargs="+",
        help="how far plans, replays and what-ifs of these runs, and from one to another, are off",
    )
    checkpoint.add_parser(commands)
    cluster.add_parser(commands)
    calibrate.add_parser(commands)
    timeline.add_parser(commands)
    top.add_parser(commands)
    what_if.add_parser(commands)
    report.add_parser(commands)
    watch.add_parser(commands)
    chosen, overrides = parser.parse_known_args(arguments)
    plans = chosen.command == "plan"
    further = plans and overrides and overrides[0] in FURTHER_PLANS
    which = overrides.pop(0) if further else ""
    if unknown := [word for word in overrides if word.startswith("-") or not plans]:
        (plan if plans else parser).error(f"unknown: {' '.join(unknown)}")
    console = Console(stderr=True)
    try:
        if plans:
            _check_words(chosen, which)
        if plans and chosen.backtest:
            importlib.import_module("hybridrl.commands.backtest").run(chosen)
        elif plans and chosen.search:
            importlib.import_module("hybridrl.plan_search").run(chosen, overrides)
        elif which:
            importlib.import_module(FURTHER_PLANS[which]).run(chosen, overrides)
        elif plans:
            _plan(chosen, overrides)
        else:
            sys.exit(COMMANDS[chosen.command].run(chosen))
    except HybridRLError as error:
        console.print("error:", style="bold red", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(REFUSED)


def _plan(chosen: argparse.Namespace, overrides: Sequence[str]) -> None:
    from hybridrl.config.load import load_config
    from hybridrl.planner import table
    from hybridrl.planner.cures import refuse
    from hybridrl.planner.described import with_described_models
    from hybridrl.planner.plan import make_plan, to_json
    from hybridrl.preflight import preflight

    config = load_config(overrides)
    lengths = lengths_of(chosen.lengths)
    problems = Problems()
    unseen = preflight(config, problems, plans=True, is_elsewhere=chosen.devices is not None)
    problems.raise_if_any()
    machines = cluster_of(config, chosen.devices)
    with with_described_models(config, tiny_of(config)) as described:
        plan = make_plan(described, machines, lengths=lengths)
        if plan.fits():
            rates = _rates(described, plan)
            plan = make_plan(described, machines, lengths=lengths, rates=rates)
        if chosen.json:
            sys.stdout.write(to_json(plan) + "\n")
        else:
            console = Console(width=None if sys.stdout.isatty() else 160)
            for line in table.sizes_lines(plan):
                console.print(line, highlight=False, markup=False)
            for notice in filter(None, (plan.notice, *unseen)):
                console.print(notice, highlight=False, markup=False)
            for shown in table.tables(plan):
                console.print()
                console.print(shown)
        refuse(plan)


def cluster_of(config: Config, text: str | None) -> Cluster:
    """What `--devices` names, or the devices that the job gets of this machine."""
    from hybridrl.planner import devices

    if text is not None:
        return devices.named(text)
    from hybridrl.checks.settings import devices_here

    return devices.present(devices_here(config))


def _rates(config: Config, plan: Plan) -> Rates | list[Rates]:
    """Known ones, or measured here."""
    from hybridrl.planner.rates import Rates

    if plan.cluster.rates_known:
        return Rates.known(plan.cluster, plan.config.model.dtype)
    from hybridrl.planner.probe import probe

    tokens = max((batch.tokens for batch in plan.batches.values()), default=1)
    length = plan.sizes.sample_tokens
    return probe(config.model.path, plan.config.model.dtype, plan.cluster, tokens, length)


def tiny_of(config: Config) -> PretrainedConfig | None:
    """The architecture of the model that is made where none is given."""
    if config.model.path is not None:
        return None
    from dataclasses import asdict

    from hybridrl.inputs import tiny_tokenizer
    from hybridrl.models import tiny_config

    found = tiny_config(**asdict(config.model.tiny))
    if not (config.data.task or config.data.sources or config.environment.name):
        raise ConfigError(
            "model.path is not set. Set it to a folder, a hub name, or a size to plan with: "
            "llama-7b, llama-13b, llama-34b, llama-70b."
        )
    found.vocab_size = len(tiny_tokenizer(config))
    return found


def _check_words(chosen: argparse.Namespace, which: str) -> None:
    """Refuses what a plan of this kind has no use for, and a file that cannot be written, before
    anything is measured."""
    if chosen.role is not None and which != "precision":
        raise ConfigError(f"--role {chosen.role} is for `hybridrl plan precision`. Leave it out.")
    for option in ("price", "within", "deadline"):
        if getattr(chosen, option) is not None and not chosen.search:
            raise ConfigError(f"--{option} is for `hybridrl plan --search`. Add --search.")
    if chosen.search and which:
        raise ConfigError(f"--search is not for `hybridrl plan {which}`. Leave it out.")
    if chosen.out is None:
        return
    if not (which or chosen.search):
        raise ConfigError(
            f"--out {chosen.out} is for `hybridrl plan generation` and `hybridrl plan precision`. "
            "Take --json, which writes the plan to standard output."
        )
    file = Path(chosen.out).expanduser()
    place = file if file.exists() else file.parent
    if file.is_dir() or not place.exists() or not os.access(place, os.W_OK):
        raise ConfigError(
            f"--out {chosen.out}: no file can be written there. Name one in a folder that exists "
            "and that you can write to."
        )


def lengths_of(text: str | None) -> tuple[float, float] | None:
    """Tokens of prompt and response that `--lengths` says.

    Raises:
        ConfigError: if it says something else.
    """
    if text is None:
        return None
    try:
        prompt, response = (float(part) for part in text.split("+"))
        if not (0 < prompt < math.inf and 0 < response < math.inf):
            raise ValueError
    except ValueError as error:
        raise ConfigError(
            f"--lengths {text}: write PROMPT+RESPONSE, numbers of tokens such as 300+800."
        ) from error
    return prompt, response


if __name__ == "__main__":
    main()
