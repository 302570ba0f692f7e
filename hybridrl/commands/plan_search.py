"""`hybridrl plan --search`: search placements and settings, and print the best with the reasons
against the others."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from rich.console import Console

from hybridrl.commands.plan_options import cluster_of, lengths_of, planned, tiny_of
from hybridrl.config.changed import Setting, changed
from hybridrl.errors import ConfigError
from hybridrl.job.preflight import preflight
from hybridrl.planner.fitting_settings import choose_settings
from hybridrl.planner.machine.cluster_rates import resolve_rates
from hybridrl.planner.named_models import with_described_models
from hybridrl.planner.sample_lengths import read_lengths
from hybridrl.planner.search.proposals import (
    Proposal,
    Proposals,
    fewest_devices,
    per_dollar,
    prices_of,
    propose,
)
from hybridrl.planner.search.search_tables import reasons, settings_lines, side_by_side, words
from hybridrl.planner.search.search_terms import Objective
from hybridrl.system.cluster_spec import Cluster
from hybridrl.system.formatting import readable_seconds
from hybridrl.systems.operator_costs.cost_source import offer_costs

DEADLINE_S = 60.0


def run(chosen: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Search, print the proposals, and write the best to `--out`.

    Raises:
        ConfigError: for what is wrong with settings or options, and if nothing fits.
    """
    if chosen.deadline is not None and not 0 < chosen.deadline < math.inf:
        raise ConfigError(f"--deadline {chosen.deadline:g}: must be seconds above 0.")
    config, unnamed = planned(overrides)
    lengths = lengths_of(chosen.lengths)
    if lengths is None and config.placement.lengths is not None:
        lengths = read_lengths(config.placement.lengths, "placement.lengths")
    is_elsewhere = chosen.devices is not None
    preflight(config, plans=True, is_elsewhere=is_elsewhere)
    cluster = cluster_of(config, chosen.devices)
    objective = _objective(chosen, cluster)
    offer_costs()
    with with_described_models(config, tiny_of(config)) as described:
        left = choose_settings(described, cluster, lengths, is_elsewhere=is_elsewhere)
        described = changed(described, left)
        rates = resolve_rates(described, cluster, lengths)
        found = propose(
            described,
            cluster,
            rates,
            lengths,
            objective=objective,
            deadline_s=DEADLINE_S if chosen.deadline is None else chosen.deadline,
        )
    quickest = found.best[0].seconds
    if chosen.within is not None and quickest > chosen.within:
        raise ConfigError(
            f"--within {chosen.within:g}: no way is as quick; the quickest that was found takes "
            f"{readable_seconds(quickest)}."
        )
    if chosen.json:
        sys.stdout.write(json.dumps(_data(found, dict(left)), indent=2) + "\n")
    else:
        _show(found, chosen.price, unnamed)
    if chosen.out is not None:
        _write(found.best[0], left, Path(chosen.out).expanduser())


def _objective(chosen: argparse.Namespace, cluster: Cluster) -> Objective:
    if chosen.price is not None and chosen.within is not None:
        raise ConfigError("--price and --within: one thing can be looked for. Leave one out.")
    if chosen.within is not None:
        if not 0 < chosen.within < math.inf:
            raise ConfigError(f"--within {chosen.within:g}: must be seconds above 0.")
        return fewest_devices(chosen.within)
    if chosen.price is not None:
        return per_dollar(prices_of(chosen.price), cluster)
    return Objective()


def _show(found: Proposals, price: str | None, unnamed: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    per = None
    if price is not None:
        prices = prices_of(price)

        def per(one: Proposal) -> float:
            cost = per_dollar(prices, one.plan.cluster)
            devices = len(one.plan.cluster.devices)
            return one.plan.sizes.tokens / cost.of(one.seconds, devices)[0]

    console.print(side_by_side(found, per))
    for line in (unnamed, "", *settings_lines(found), "", *reasons(found)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _data(found: Proposals, chosen: Mapping[str, object]) -> dict[str, object]:
    return {
        "best": [
            {
                **json.loads(one.to_json()),
                "settings": {**chosen, **dict(one.settings)},
                "step_seconds": one.seconds,
                "idle": dict(one.plan.times.idle) if one.plan.times else {},
                "memory_share": one.plan.filled(one.plan.fullest),
            }
            for one in found.best
        ],
        "reasons": reasons(found),
        "complete": found.report.complete,
    }


def _write(best: Proposal, left: Sequence[Setting], file: Path) -> None:
    """Write the placement, and a recipe of the settings that it depends on, because a start with
    this placement might choose others."""
    placement, recipe = file.with_suffix(".json"), file.with_suffix(".yaml")
    placement.write_text(best.to_json() + "\n")
    settings = {"placement": "file", "placement.path": str(placement.resolve())}
    needed = dict(left) | dict(best.settings)
    recipe.write_text(yaml.safe_dump(settings | needed, sort_keys=False))
    console = Console(stderr=True)
    said = " ".join(words(tuple(needed.items())))
    console.print(
        f"written: {placement} and {recipe}; add recipe={recipe} to the job's settings"
        f"{f' (it says {said})' if said else ''}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
