"""`hybridrl plan`: predict placement, memory and step time of a job without starting it; also
`precision`, `generation`, `--search` and `--backtest`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from hybridrl.commands.output import print_for_people
from hybridrl.commands.plan_options import (
    parse_lengths,
    planned,
    resolve_cluster,
    resolve_tiny_model,
)
from hybridrl.errors import ConfigError

GENERATION_PLAN, PRECISION_PLAN = "generation", "precision"
"""What else is planned, by the first word after `hybridrl plan`."""

_AUTO_RESOURCES_NOTICE = (
    "resources=auto: cores are chosen by measuring steps. The run tells what it chose, what it "
    "expects of that and what came of it."
)
_AUTO_PLACEMENT_NOTICE = (
    "With placement=auto a start searches for a placement; this is the plan of flattening. Add "
    "--search for what it would find."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Says where the roles of a job will live, what that takes of each device, and "
        "how long a step will last; starts nothing. `precision`: which layers a slower device "
        "computes in fewer bits. `generation`: how unequal devices generate together."
    )
    parser.usage = (
        "hybridrl plan [generation | precision] [key=value ...] [--json]\n"
        "                     [--devices DEVICES] [--lengths PROMPT+RESPONSE]\n"
        "                     [--role ROLE] [--out FILE]\n"
        "                     [--search [--price NAME=DOLLARS | --within SECONDS] "
        "[--deadline SECONDS]]\n"
        "                     [--backtest RUN ...]"
    )
    parser.set_defaults(settings=[])
    parser.add_argument("--json", action="store_true", help="as data, which placement=file takes")
    parser.add_argument(
        "--devices",
        help="plan for machines that are not here: 64xH200, 16x8xH100, 8xL4,16xH100@400Gbps, or a "
        "JSON file of `hybridrl cluster probe`. For `precision` and `generation` a JSON file of "
        'unequal ones: [{"name": "new"}, {"name": "old", "share": 0.5, "memory_gib": 16}]',
    )
    parser.add_argument(
        "--lengths",
        metavar="PROMPT+RESPONSE",
        help="tokens of a usual sample, such as 300+800; 300+800..4096 if a step waits for a much "
        "longer one; or a run, whose lengths they are; else the longest that are allowed",
    )
    parser.add_argument("--role", help="for `precision`: whose layers; else the actor's")
    parser.add_argument(
        "--out", metavar="FILE", help="for `generation`, `precision`, --search: where the plan goes"
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="look for the placement, the cuts and the settings with which the job is quickest",
    )
    parser.add_argument(
        "--price",
        metavar="NAME=DOLLARS",
        help="with --search: what most tokens a dollar are made with; dollars an hour of each kind "
        "of device: H100=2.5,L4=0.7",
    )
    parser.add_argument(
        "--within",
        metavar="SECONDS",
        type=float,
        help="with --search: the fewest devices with which a step takes no longer",
    )
    parser.add_argument(
        "--deadline",
        metavar="SECONDS",
        type=float,
        help="with --search: the best that is found by then (60)",
    )
    parser.add_argument(
        "--backtest",
        metavar="RUN",
        nargs="+",
        help="how far plans, replays and what-ifs of these runs, and from one to another, are off",
    )


def run(chosen: argparse.Namespace) -> int:
    """Make the plan that the options ask for, and print it.

    Raises:
        HybridRLError: for what is wrong with settings or options, and for what does not fit.
    """
    settings = list(chosen.settings)
    kind = settings.pop(0) if settings[:1] in ([GENERATION_PLAN], [PRECISION_PLAN]) else ""
    _check_options(chosen, kind)
    if chosen.backtest:
        from hybridrl.commands import backtest

        backtest.run(chosen)
    elif chosen.search:
        from hybridrl.commands import plan_search

        plan_search.run(chosen, settings)
    elif kind == GENERATION_PLAN:
        from hybridrl.commands import plan_generation

        plan_generation.run(chosen, settings)
    elif kind == PRECISION_PLAN:
        from hybridrl.commands import plan_precision

        plan_precision.run(chosen, settings)
    else:
        _plan_job(chosen, settings)
    return 0


def _plan_job(chosen: argparse.Namespace, settings: list[str]) -> None:
    config, unnamed = planned(settings)
    lengths = parse_lengths(chosen.lengths)
    # These bring torch and transformers, which take seconds; wrong words are refused without them.
    from hybridrl.config.changed import apply_changes
    from hybridrl.job.preflight import run_preflight
    from hybridrl.planner import plan_tables as table
    from hybridrl.planner.fitting_settings import (
        check_plan_fits,
        choose_automatic_settings,
        format_settings,
    )
    from hybridrl.planner.job_plan import build_job_plan, job_plan_to_json
    from hybridrl.planner.machine.cluster_rates import resolve_rates
    from hybridrl.planner.named_models import materialize_named_models
    from hybridrl.systems.operator_costs.cost_source import offer_costs

    offer_costs()
    is_elsewhere = chosen.devices is not None
    unseen = run_preflight(config, plans=True, is_elsewhere=is_elsewhere)
    machines = resolve_cluster(config, chosen.devices)
    with materialize_named_models(config, resolve_tiny_model(config)) as described:
        left = choose_automatic_settings(described, machines, lengths, is_elsewhere=is_elsewhere)
        described = apply_changes(described, left)
        plan = build_job_plan(described, machines, lengths=lengths)
        if plan.fits():
            rates = resolve_rates(described, machines, lengths)
            plan = build_job_plan(described, machines, lengths=lengths, rates=rates)
        if chosen.json:
            sys.stdout.write(job_plan_to_json(plan, left) + "\n")
        else:
            said = f"Chosen: {', '.join(format_settings(left))}." if left else ""
            searched = _AUTO_PLACEMENT_NOTICE if config.placement.strategy == "auto" else ""
            cores = _AUTO_RESOURCES_NOTICE if config.resources == "auto" else ""
            notices = filter(None, (unnamed, said, cores, searched, plan.notice, *unseen))
            print_for_people(*table.format_step_sizes(plan), *notices)
            for shown in table.build_plan_tables(plan):
                print_for_people("", shown)
        check_plan_fits(plan)


def _check_options(chosen: argparse.Namespace, kind: str) -> None:
    """Refuse options that this kind of plan does not take, and an output file that cannot be
    written, before anything is measured."""
    if chosen.role is not None and kind != PRECISION_PLAN:
        raise ConfigError(f"--role {chosen.role} is for `hybridrl plan precision`. Leave it out.")
    for option in ("price", "within", "deadline"):
        if getattr(chosen, option) is not None and not chosen.search:
            raise ConfigError(f"--{option} is for `hybridrl plan --search`. Add --search.")
    if chosen.search and kind:
        raise ConfigError(f"--search is not for `hybridrl plan {kind}`. Leave it out.")
    if chosen.out is None:
        return
    if not (kind or chosen.search):
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
