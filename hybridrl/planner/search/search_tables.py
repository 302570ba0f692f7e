"""Tables of a search for a person: the best proposals side by side, and why the others lose."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rich.table import Table

from hybridrl.placement import ACTOR_ROLE, GENERATOR_ROLE
from hybridrl.planner.fitting_settings import format_settings
from hybridrl.planner.plan_tables import PHASE_VERBS, format_ranges
from hybridrl.planner.search.proposals import PlacementProposal, SearchResult
from hybridrl.planner.step.graph_replay import NOTHING_TO_DO
from hybridrl.system.formatting import format_gib, format_seconds

_NEGLIGIBLE_SHARE = 0.005
"""Shares that differ by less are alike to a person."""


def build_proposals_table(
    found: SearchResult, tokens_per_dollar: Callable[[PlacementProposal], float] | None
) -> Table:
    """Build a table with a column for each proposal, the best first."""
    table = Table(title="the best ways", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for number, _ in enumerate(found.best, 1):
        table.add_column(str(number), overflow="fold")

    def row(name: str, cell: Callable[[PlacementProposal], str], style: str = "") -> None:
        table.add_row(name, *(cell(one) for one in found.best), style=style)

    row("seconds of a step", lambda p: f"{p.seconds:.3g}", style="bold")
    row("samples/s", lambda p: f"{p.plan.sizes.samples / p.seconds:.3g}")
    if tokens_per_dollar is not None:
        row("tokens a dollar", lambda p: f"{tokens_per_dollar(p):,.0f}")
    for role in dict.fromkeys(role for one in found.best for role in one.placement.roles):
        row(f"{role}: devices", partial(_where, role=role))
        row("  cut", partial(_cut, role=role))
        for phase in ("sync", "generate", "score", "train"):
            if any(one.times.phases.get((role, phase)) for one in found.best):
                row(f"  {PHASE_VERBS[phase]}", partial(_phase_seconds, part=(role, phase)))
    row("fullest device, GiB", _memory)
    row("idle", lambda p: f"{p.times.idle_share:.0%}")
    return table


def settings_lines(found: SearchResult) -> list[str]:
    """List the settings that each proposal needs beside those asked for, a line each."""
    return [
        f"{number}: {' '.join(format_settings(one.settings)) or 'settings as asked'}"
        for number, one in enumerate(found.best, 1)
    ]


def explain_ranking(found: SearchResult) -> list[str]:
    """List a sentence about each of the other proposals, and about what did not fit or was
    refused."""
    best, *others = found.best
    said = [
        f"{number}: {_explain_difference(best, other)}" for number, other in enumerate(others, 2)
    ]
    report = found.report
    if report.misfits:
        tightest = sorted(report.misfits.items(), key=lambda one: one[1])
        named = ", ".join(f"{shape} ({lack:.0%} of a device)" for shape, lack in tightest[:3])
        said.append(
            f"{len(report.misfits)} other way(s) to share devices seemed quicker and do not fit, "
            f"the leanest of them: {named}"
        )
    said += [f"refused: {sentence}" for sentence in found.refused[:2]]
    said.append(f"seconds are by {best.times.source}")
    how = "none that is left can be better" if report.complete else "the time was over"
    seen = f"{report.looked_at} of {report.ways:,} ways were looked at"
    said.append(f"{seen} in {format_seconds(report.seconds)}; {how}.")
    return said


def _explain_difference(best: PlacementProposal, other: PlacementProposal) -> str:
    """Explain why a proposal is behind the best one."""
    longer = other.seconds / best.seconds - 1
    start = f"{longer:.1%} longer" if longer >= _NEGLIGIBLE_SHARE else "about as quick"
    used, before = (len(one.plan.cluster.devices) for one in (other, best))
    if used != before:
        start += f", on {used} device(s) (1: {before})"
    first, then = _by_part(best), _by_part(other)
    slower = {
        part: seconds - first.get(part, 0.0)
        for part, seconds in then.items()
        if seconds - first.get(part, 0.0) > _NEGLIGIBLE_SHARE * best.seconds
    }
    said = []
    for part in sorted(slower, key=lambda part: -slower[part])[:2]:
        role, phase = part
        said.append(
            f"{role} {PHASE_VERBS[phase]} for {format_seconds(then[part])} on "
            f"{_devices(other, part)} device(s) (1: {format_seconds(first.get(part, 0.0))} on "
            f"{_devices(best, part)})"
        )
    idle, at_best = other.times.idle_share, best.times.idle_share
    if idle > at_best + _NEGLIGIBLE_SHARE:
        cause = next(iter(other.times.idle))
        said.append(
            f"its devices are idle for {idle:.0%} of the time (1: {at_best:.0%}), "
            f"mostly {'with' if cause == NOTHING_TO_DO else 'waiting for'} "
            f"{cause.replace('.', ' to ')}"
        )
    if not said and longer >= _NEGLIGIBLE_SHARE:
        said.append("calls that the first makes side by side take turns")
    return f"{start}: {'; '.join(said)}" if said else start


def _by_part(proposal: PlacementProposal) -> dict[tuple[str, str], float]:
    """Return the seconds by role and phase; those of a separate generator count as the actor's."""
    return {
        (ACTOR_ROLE if role == GENERATOR_ROLE else role, phase): seconds
        for (role, phase), seconds in proposal.times.phases.items()
    }


def _devices(proposal: PlacementProposal, part: tuple[str, str]) -> int:
    role, phase = part
    roles = proposal.placement.roles
    apart = role == ACTOR_ROLE and phase in ("sync", "generate") and GENERATOR_ROLE in roles
    place = roles.get(GENERATOR_ROLE if apart else role)
    return len(place.devices) if place else 0


def _phase_seconds(proposal: PlacementProposal, part: tuple[str, str]) -> str:
    seconds = proposal.times.phases.get(part)
    return "" if seconds is None else f"{seconds:.3g}"


def _where(proposal: PlacementProposal, role: str) -> str:
    place = proposal.placement.roles.get(role)
    return format_ranges(place.devices) if place else ""


def _cut(proposal: PlacementProposal, role: str) -> str:
    place = proposal.placement.roles.get(role)
    if place is None or role not in proposal.found.cuts:
        return ""
    sizes = {name: getattr(place.parallel, name) for name in ("pp", "tp", "ring", "ulysses")}
    said = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    rollout = proposal.found.cuts[role].rollout_tp
    return ", ".join([*said, *([f"generates tp={rollout}"] if rollout > 1 else [])]) or "dp"


def _memory(proposal: PlacementProposal) -> str:
    device = proposal.plan.fullest
    return f"{format_gib(device.fullest.bytes)} of {format_gib(device.memory)}"
