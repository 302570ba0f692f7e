"""A run's calls with other settings, or on other devices: each in proportion to its plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from hybridrl.checks.machine.placement_checks import resolve_placement
from hybridrl.config.changed import Setting, apply_changes
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.placement import Placement
from hybridrl.planner.job_plan import build_job_plan
from hybridrl.planner.machine.cluster_rates import resolve_rates
from hybridrl.planner.named_models import materialize_named_models
from hybridrl.planner.step.graph_replay import WorkGraph
from hybridrl.planner.step.step_time import TimeEstimate
from hybridrl.planner.what_if.graph_changes import NodeFilter, move_role, scale_speed
from hybridrl.planner.what_if.recorded_run import RecordedRun
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.trainers import load_roles

PhaseSeconds = Mapping[tuple[str, str], float]
_UNPLANNED_SETTINGS = {
    "num_devices": "ask --set devices=...",
    "placement.staleness": "it moves whole calls: ask `hybridrl plan` with it and without it.",
    **dict.fromkeys(
        ("rollout.max_tokens", "data.max_prompt_tokens", "data.max_response_tokens"),
        "it is a limit, and samples are as long as they were: ask --scale responses=2x.",
    ),
}
"""Settings that no plan for samples as long as they were, on these devices, has an answer to."""


def replan_graph(
    run: RecordedRun, graph: WorkGraph, settings: Sequence[Setting], number: int | None
) -> tuple[WorkGraph, list[str], str]:
    """Change a recorded graph to other settings or other devices: each call in proportion to its
    plans.

    Args:
        number: Of devices; None: as many as there were.

    Returns:
        The graph, the settings without which the plan would be the same, and the measurement that
        the plans rest on.

    Raises:
        ConfigError: for settings that no plan of these calls has in it.
    """
    _check_settings(run, settings)
    was = planned_times(run)
    old = was.phases
    placement, new = _otherwise(run, settings, number)
    ratios = {key: new[key] / old[key] for key in old.keys() & new.keys() if old[key]}
    if placement is run.placement:
        for (role, phase), ratio in ratios.items():
            graph = scale_speed(graph, NodeFilter(role, phase), 1 / ratio)
    else:
        for role, place in placement.roles.items():
            of_role = {phase: ratio for (name, phase), ratio in ratios.items() if name == role}
            if any(node.role == role and node.place >= 0 for node in graph.nodes):
                graph = move_role(graph, role, place.devices, of_role)
    unseen = []
    for setting in settings:
        rest = [one for one in settings if one is not setting]
        with suppress(ConfigError):  # the others cannot be without it
            if _otherwise(run, rest, number) == (placement, new):
                unseen.append(setting[0])
    return graph, unseen, was.source


def _otherwise(
    run: RecordedRun, settings: Sequence[Setting], number: int | None
) -> tuple[Placement, PhaseSeconds]:
    """Return the placement with these settings on this many devices, and the planned seconds of its
    phases."""
    config, cluster, placement = apply_changes(run.config, settings), run.cluster, run.placement
    number = len(cluster.devices) if number is None else number
    are_others = number != len(cluster.devices)
    if are_others:
        cluster = resize_cluster(cluster, number)
        config = replace(config, num_devices=number)
    # Settings of where roles live, or of how they are cut.
    if are_others or any(
        name.startswith("placement.") or ".parallel." in name for name, _ in settings
    ):
        _check_free(config, are_others)
        placement = resolve_placement(config, cluster)
        if placement.is_separated != run.placement.is_separated:
            raise ConfigError(
                f"--set: with placement={config.placement.strategy} other devices would generate "
                "than in the run, of which nothing is recorded. Ask `hybridrl plan` with the "
                "settings and without them."
            )
    with materialize_named_models(config) as described:
        return placement, _times(run, described, cluster, placement).phases


def _check_free(config: Config, are_others: bool) -> None:
    """Refuse placements that cannot be made again: by device numbers when devices differ, or by a
    search."""
    strategy = config.placement.strategy
    if are_others and strategy in ("explicit", "file"):
        raise ConfigError(
            f"--set devices=...: placement={strategy} names devices by their numbers. Add --set "
            "placement.strategy=flattening, or another one."
        )
    if strategy == "auto":
        raise ConfigError(
            "--set: placement=auto would search anew, which `hybridrl plan --search` does. Add "
            "--set placement.strategy=flattening, or another one."
        )


def resize_cluster(cluster: ClusterSpec, number: int) -> ClusterSpec:
    """Return a cluster of this many devices: the first ones, or all and more like the first on
    further nodes."""
    there, per_node = cluster.devices, cluster.devices_per_node
    if number <= len(there):
        return cluster.take(range(number))
    new = [
        replace(there[0], node=f"node {len(cluster.nodes) + n // per_node}", index=n % per_node)
        for n in range(number - len(there))
    ]
    hosts = dict(cluster.hosts)
    if hosts:
        hosts |= dict.fromkeys((device.node for device in new), hosts[there[0].node])
    return ClusterSpec([*there, *new], cluster.models, hosts)


def _check_settings(run: RecordedRun, settings: Sequence[Setting]) -> None:
    for name, _ in settings:
        if name in _UNPLANNED_SETTINGS:
            raise ConfigError(f"--set {name}=...: {_UNPLANNED_SETTINGS[name]}")
    before = set(load_roles(run.config))
    after = set(load_roles(apply_changes(run.config, settings)))
    if different := before ^ after:
        names = ", ".join(name for name, _ in settings)
        raise ConfigError(
            f"--set {names}: the run has recorded the roles {', '.join(sorted(before))}, and the "
            f"job would differ by {', '.join(sorted(different))}. Ask `hybridrl plan` with the "
            "setting and without it."
        )


def planned_times(run: RecordedRun) -> TimeEstimate:
    """Return the times that a run's plan has for samples as long as they were."""
    return _times(run, run.config, run.cluster, run.placement)


def _times(
    run: RecordedRun, config: Config, cluster: ClusterSpec, placement: Placement
) -> TimeEstimate:
    """Estimate the time of a step with these settings, for samples of the recorded lengths."""
    rates = resolve_rates(config, cluster, run.lengths, makers_first=True)
    plan = build_job_plan(config, cluster, placement, run.lengths, rates)
    assert plan.times is not None  # for there are rates
    return plan.times
