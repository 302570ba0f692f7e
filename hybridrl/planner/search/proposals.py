"""`placement=auto`: the placement and the settings with which a job is quickest here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybridrl.checks.machine.placement_checks import resolve_placement
from hybridrl.config.changed import apply_changes
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.placement import Placement
from hybridrl.planner.job_plan import JobPlan, build_job_plan
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.memory.device_memory import FREE_SHARE
from hybridrl.planner.search.placement_search import search_placements
from hybridrl.planner.search.planned_costs import PlannedSearchCosts
from hybridrl.planner.search.search_terms import (
    FoundPlacement,
    SearchObjective,
    SearchReport,
    SettingChanges,
)
from hybridrl.planner.step.step_calls import SampleLengths
from hybridrl.planner.step.step_time import TimeEstimate
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.trainers.role_spec import RoleSpec

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class PlacementProposal:
    """A placement for a job, with the settings that it needs and its plan.

    Attributes:
        settings: That differ from what was asked, beside the placement.
        plan: What it takes, as at the start of such a job.
    """

    found: FoundPlacement
    settings: SettingChanges
    plan: JobPlan

    @property
    def placement(self) -> Placement:
        return self.plan.placement

    @property
    def times(self) -> TimeEstimate:
        """Return the planned times of a step, with reward functions and judges, which a search
        leaves out."""
        assert self.plan.times is not None  # for a search has rates
        return self.plan.times

    @property
    def seconds(self) -> float:
        """Return the planned seconds of a step."""
        return self.times.step

    def to_json(self) -> str:
        """Return the text of a placement.json that includes the settings of this proposal."""
        return json.dumps(
            {**json.loads(self.placement.to_json()), "settings": dict(self.settings)}, indent=2
        )


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: the accepted proposals, best first, and how the search went.

    Attributes:
        best: In order.
        report: How it went.
        refused: Sentences about ways that a start would have refused.
    """

    best: Sequence[PlacementProposal]
    report: SearchReport
    refused: Sequence[str]


def propose_placements(
    config: Config,
    cluster: ClusterSpec,
    rates: Sequence[DeviceRates],
    lengths: SampleLengths | None = None,
    roles: Mapping[str, RoleSpec] | None = None,
    *,
    longest: SampleLengths | None = None,
    objective: SearchObjective | None = None,
    deadline_s: float = 60.0,
) -> SearchResult:
    """Search for placements and return the best that pass all checks of a start.

    Args:
        config: With folders for models.
        cluster: With memory of its devices.
        rates: Of each device.
        lengths: Of its samples; None: the longest that are allowed.
        roles: Of the job; None: those of its trainer.
        longest: For which there has to be memory; None: for `lengths`.
        objective: What is to be small; None: the seconds of a step.

    Raises:
        ConfigError: if nothing fits, or nothing was found in time.
    """
    costs = PlannedSearchCosts(config, cluster, rates, lengths, roles)
    made: dict[int, PlacementProposal] = {}
    refused: list[str] = []

    def accept(found: FoundPlacement) -> bool:
        settings = costs.settings(found)
        total = max(devices.stop for devices in found.where.values())
        used = cluster.take(range(total))
        placement = costs.placement(found)
        config_ = apply_changes(costs.config, list(settings))
        if total < len(cluster.devices):
            config_ = replace(config_, num_devices=total)
            settings = (*settings, ("num_devices", total))
        try:
            resolve_placement(config_, used, costs.specs, placement)
            plan = build_job_plan(config_, used, placement, lengths, rates[:total], costs.specs)
            fullest = plan
            if longest is not None and longest != lengths:
                fullest = build_job_plan(config_, used, placement, longest, roles=costs.specs)
        except ConfigError as error:
            refused.append(str(error))
            return False
        if plan.memory_share is not None and config_.rollout.memory_share is None:
            settings = (*settings, ("rollout.memory_share", plan.memory_share))
        if not fullest.fits(1 - FREE_SHARE):
            filled = fullest.fullest.filled
            refused.append(f"{found.shape}: device memory is filled to {filled:.0%}")
            return False
        made[id(found)] = PlacementProposal(found, settings, plan)
        return True

    report = search_placements(costs, objective, deadline_s=deadline_s, accept=accept)
    best = [made[id(found)] for found in report.best]
    if not best and not report.complete:
        raise ConfigError(
            f"placement=auto had found nothing for {cluster} when its {deadline_s:g} s were over; "
            f"{report.looked_at} ways had been looked at. Take longer, by `hybridrl plan "
            "--search --deadline 300 --out mine.json`, or another placement, such as "
            "placement=flattening."
        )
    if not best:
        least = min(report.misfits.values(), default=float("inf"))
        why = f"of all that was looked at the leanest fills a device to {least:.0%}"
        if least == float("inf") or least <= 1:
            why = refused[0] if refused else "the models cannot be cut over so many devices"
        raise ConfigError(
            f"placement=auto found nothing that fits {cluster}: {why}. Take more or larger "
            "devices or a smaller model, or set actor.offload_parameters=true."
        )
    return SearchResult(best, report, list(dict.fromkeys(refused)))


def parse_prices(text: str) -> dict[str, float]:
    """Parse prices such as `H100=2.5,L4=0.7` into dollars per hour by device name.

    Raises:
        ConfigError: for anything else.
    """
    found = {}
    for part in text.split(","):
        name, _, price = part.strip().partition("=")
        try:
            found[name] = float(price)
        except ValueError:
            found[name] = 0.0
        if not name or not 0 < found[name] < float("inf"):
            raise ConfigError(
                f"--price {text}: write dollars an hour of each kind of device: H100=2.5,L4=0.7."
            )
    return found


def cost_objective(prices: Mapping[str, float], cluster: ClusterSpec) -> SearchObjective:
    """Return the objective that minimizes the cost of a step in dollars.

    Args:
        prices: Dollars an hour of a device, by its model.

    Raises:
        ConfigError: if a model of the cluster has no price.
    """
    known = {name.lower(): price for name, price in prices.items()}
    missing = [name for name in cluster.model_names if _price(known, name) is None]
    if missing:
        raise ConfigError(
            f"--price {','.join(f'{n}={p:g}' for n, p in prices.items())}: {missing[0]} has no "
            f"price. Write --price {missing[0]}=2.5, dollars an hour, for each kind of device."
        )
    each = [_price(known, device.model) or 0.0 for device in cluster.devices]
    return SearchObjective(
        lambda step, devices: (step * sum(each[:devices]) / _SECONDS_PER_HOUR,), True
    )


def _price(known: Mapping[str, float], name: str) -> float | None:
    return known.get(name.lower(), known.get(name.split("-")[0].lower()))


def fewest_devices_objective(within_s: float) -> SearchObjective:
    """Return the objective that minimizes the number of devices with which a step takes at most
    `within_s` seconds, then its time."""
    return SearchObjective(
        lambda step, devices: (float(step > within_s), devices if step <= within_s else step, step),
        True,
    )
