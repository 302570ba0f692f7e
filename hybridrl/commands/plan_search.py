"""`hybridrl plan --search`: search placements and settings, and print the best with the reasons
against the others."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from hybridrl.commands.output import print_for_people
from hybridrl.commands.plan_options import (
    parse_lengths,
    planned,
    resolve_cluster,
    resolve_tiny_model,
)
from hybridrl.config.changed import Setting, apply_changes
from hybridrl.errors import ConfigError
from hybridrl.job.preflight import run_preflight
from hybridrl.planner.fitting_settings import choose_automatic_settings, format_settings
from hybridrl.planner.machine.cluster_rates import resolve_rates
from hybridrl.planner.named_models import materialize_named_models
from hybridrl.planner.sample_lengths import parse_sample_lengths
from hybridrl.planner.search.proposals import (
    PlacementProposal,
    SearchResult,
    cost_objective,
    fewest_devices_objective,
    parse_prices,
    propose_placements,
)
from hybridrl.planner.search.search_tables import (
    build_proposals_table,
    explain_ranking,
    settings_lines,
)
from hybridrl.planner.search.search_terms import SearchObjective
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.system.formatting import format_seconds
from hybridrl.systems.operator_costs.cost_source import offer_costs

_DEFAULT_DEADLINE_S = 60.0


def run(chosen: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Search, print the proposals, and write the best to `--out`.

    Raises:
        ConfigError: for what is wrong with settings or options, and if nothing fits.
    """
    if chosen.deadline is not None and not 0 < chosen.deadline < math.inf:
        raise ConfigError(f"--deadline {chosen.deadline:g}: must be seconds above 0.")
    config, unnamed = planned(overrides)
    lengths = parse_lengths(chosen.lengths)
    if lengths is None and config.placement.lengths is not None:
        lengths = parse_sample_lengths(config.placement.lengths, "placement.lengths")
    is_elsewhere = chosen.devices is not None
    run_preflight(config, plans=True, is_elsewhere=is_elsewhere)
    cluster = resolve_cluster(config, chosen.devices)
    objective = _resolve_objective(chosen, cluster)
    offer_costs()
    with materialize_named_models(config, resolve_tiny_model(config)) as described:
        # As with placement=auto: what is open is compared by the search, not chosen before it for
        # the placement that the job has now.
        auto = replace(described, placement=replace(described.placement, strategy="auto"))
        left = choose_automatic_settings(auto, cluster, lengths, is_elsewhere=is_elsewhere)
        described = apply_changes(described, left)
        rates = resolve_rates(described, cluster, lengths)
        found = propose_placements(
            described,
            cluster,
            rates,
            lengths,
            objective=objective,
            deadline_s=_DEFAULT_DEADLINE_S if chosen.deadline is None else chosen.deadline,
        )
    quickest = found.best[0].seconds
    if chosen.within is not None and quickest > chosen.within:
        raise ConfigError(
            f"--within {chosen.within:g}: no way is as quick; the quickest that was found takes "
            f"{format_seconds(quickest)}."
        )
    if chosen.json:
        sys.stdout.write(json.dumps(_build_data(found, dict(left)), indent=2) + "\n")
    else:
        _print_proposals(found, chosen.price, unnamed)
    if chosen.out is not None:
        _write_placement_and_recipe(found.best[0], left, Path(chosen.out).expanduser())


def _resolve_objective(chosen: argparse.Namespace, cluster: ClusterSpec) -> SearchObjective:
    if chosen.price is not None and chosen.within is not None:
        raise ConfigError("--price and --within: one thing can be looked for. Leave one out.")
    if chosen.within is not None:
        if not 0 < chosen.within < math.inf:
            raise ConfigError(f"--within {chosen.within:g}: must be seconds above 0.")
        return fewest_devices_objective(chosen.within)
    if chosen.price is not None:
        return cost_objective(parse_prices(chosen.price), cluster)
    return SearchObjective()


def _print_proposals(found: SearchResult, price: str | None, unnamed: str) -> None:
    per = None
    if price is not None:
        prices = parse_prices(price)

        def per(one: PlacementProposal) -> float:
            cost = cost_objective(prices, one.plan.cluster)
            devices = len(one.plan.cluster.devices)
            return one.plan.sizes.tokens / cost.of(one.seconds, devices)[0]

    lines = unnamed, "", *settings_lines(found), "", *explain_ranking(found)
    print_for_people(build_proposals_table(found, per), *lines, pipe_width=200)


def _build_data(found: SearchResult, chosen: Mapping[str, object]) -> dict[str, object]:
    return {
        "best": [
            {
                **json.loads(one.to_json()),
                "settings": {**chosen, **dict(one.settings)},
                "step_seconds": one.seconds,
                "idle": dict(one.times.idle),
                "memory_share": one.plan.fullest.filled,
            }
            for one in found.best
        ],
        "reasons": explain_ranking(found),
        "complete": found.report.complete,
    }


def _write_placement_and_recipe(
    best: PlacementProposal, left: Sequence[Setting], file: Path
) -> None:
    """Write the placement, and a recipe of the settings that it depends on, because a start with
    this placement might choose others."""
    placement, recipe = file.with_suffix(".json"), file.with_suffix(".yaml")
    placement.write_text(best.to_json() + "\n")
    settings = {"placement": "file", "placement.path": str(placement.resolve())}
    needed = dict(left) | dict(best.settings)
    recipe.write_text(yaml.safe_dump(settings | needed, sort_keys=False))
    said = " ".join(format_settings(needed.items()))
    print_for_people(
        f"written: {placement} and {recipe}; add recipe={recipe} to the job's settings"
        f"{f' (it says {said})' if said else ''}",
        stderr=True,
    )
