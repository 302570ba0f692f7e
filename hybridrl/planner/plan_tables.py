"""A plan as a person reads it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from hybridrl.layout.training_mesh import model_parallel_size
from hybridrl.planner.job_plan import JobPlan
from hybridrl.planner.step.step_time import TimeEstimate
from hybridrl.system.formatting import format_gib

PHASE_VERBS = {
    "load": "loads",
    "train": "trains",
    "score": "scores",
    "generate": "generates",
    "sync": "syncs",
}


def build_plan_tables(plan: JobPlan) -> list[Table]:
    """Build all tables of a plan."""
    found = [build_roles_table(plan), build_memory_table(plan)]
    return found if plan.times is None else [*found, build_time_table(plan, plan.times)]


def build_time_table(plan: JobPlan, times: TimeEstimate) -> Table:
    """Build the table of the seconds of each role's phases, and of the step."""
    table = _table(f"time of a step, by {times.source}", ["call", "devices"], ["seconds"])
    for (role, phase), seconds in times.phases.items():
        where = format_ranges(plan.placement.roles[role].devices)
        table.add_row(f"{role} {PHASE_VERBS[phase]}", where, f"{seconds:.3g}")
    beside = f", {times.overlap:.0%} of the work beside other work" if times.overlap > 0.005 else ""
    table.add_row(f"a step{beside}", "", f"{times.step:.3g}", style="bold")
    return table


def build_roles_table(plan: JobPlan) -> Table:
    """Build the table of roles: their devices, their cut, and the roles that they share devices
    with."""
    table = _table("where roles live", ["role"], ["parameters"], ["devices", "cut", "beside"])
    for role, place in plan.placement.roles.items():
        table.add_row(
            role,
            _parameters(plan, role),
            format_ranges(place.devices),
            format_cut(plan, role),
            ", ".join(plan.placement.co_residents(role)) or "nobody",
        )
    return table


def _parameters(plan: JobPlan, role: str) -> str:
    """Format the number of parameters of a role's model: `30.5B, 3.35B active`."""
    if role not in plan.parameters:
        return ""
    size, active = plan.parameters[role], plan.active[role]
    return (
        format_count(size)
        if size == active
        else f"{format_count(size)}, {format_count(active)} active"
    )


def build_memory_table(plan: JobPlan) -> Table:
    """Build the table of the memory of each phase, in GiB, on each group of equal devices, against
    its capacity; and a line on the memory of nodes."""
    phases = [phase.parts for device in plan.memory for phase in device.phases]
    names = list(dict.fromkeys(name for parts in phases for name in parts))
    table = _table(
        f"memory of a device in GiB, of {_memories(plan)}",
        ["devices", "while"],
        [*names, "together", "of all"],
    )
    for device in plan.memory:
        for number, phase in enumerate(device.phases):
            share = phase.bytes / device.memory
            table.add_row(
                format_ranges(device.devices) if number == 0 else "",
                f"{phase.role} {PHASE_VERBS.get(phase.phase, phase.phase)}",
                *(format_gib(size) if (size := phase.parts.get(n)) else "." for n in names),
                format_gib(phase.bytes),
                f"{share:.0%}",
                style="bold red" if share > 1 else "bold" if phase is device.fullest else "",
            )
    if plan.host:
        parts = ", ".join(f"{format_gib(size)} for {name}" for name, size in plan.host.items())
        table.caption = f"memory of a node in GiB: {parts}"
        table.caption_justify, table.caption_style = "left", ""
    return table


def _memories(plan: JobPlan) -> str:
    """Format the memory of each device model."""
    cluster = plan.cluster
    found = {model: format_gib(cluster.models[model].memory) for model in cluster.model_names}
    if len(found) == 1:
        return next(iter(found.values()))
    return ", ".join(f"{memory} ({model})" for model, memory in found.items())


def _table(
    title: str, left: Iterable[str], right: Iterable[str], more: Iterable[str] = ()
) -> Table:
    """Build a table without rows: columns of words, of numbers, and of words again."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for names, side in ((left, "left"), (right, "right"), (more, "left")):
        for name in names:
            table.add_column(name, justify=side)  # type: ignore[arg-type]
    return table


def format_step_sizes(plan: JobPlan) -> list[str]:
    """Format the sizes of a step, a line each."""
    sizes, longest = plan.sizes, ""
    if sizes.longest_response > sizes.response_tokens:
        longest = f" (the longest {sizes.longest_response:,.0f})"
    lines = [
        f"devices     {plan.cluster}, "
        f"placement {plan.placement.strategy}, {plan.config.model.dtype}",
        f"step        {sizes.prompts:,} prompts, {sizes.samples:,} samples of "
        f"{sizes.prompt_tokens:.4g} + {sizes.response_tokens:.4g} tokens{longest} = "
        f"{sizes.tokens:,} tokens, {sizes.updates} update(s)",
    ]
    if plan.config.rollout.partial is not None:
        lines.append(
            "            The plan does not count rollout.partial: it assumes that each step waits "
            "for all its samples."
        )
    for (role, phase), batch in plan.batches.items():
        if phase == "train":
            shared = f", prompts computed once for their {batch.together} samples"
            lines.append(
                f"            {role} learns from {batch.total:,} tokens a device and update, in "
                f"{batch.count} micro-batch(es) of up to {batch.tokens:,}"
                f"{shared if batch.together > 1 else ''}"
            )
    if plan.times is not None:
        lines += [
            f"gradients   {role}.parallel.gradients="
            f"{plan.placement.roles[role].parallel.gradients}: {choice.sentence()}"
            for role, choice in plan.times.sums.items()
            if plan.placement.roles[role].parallel.gradients != "full"
        ]
    if plan.sync_bytes:
        lines.append(f"sync        {format_gib(plan.sync_bytes)} GiB to each device")
    return lines


def format_start_summary(plan: JobPlan) -> list[str]:
    """Format roles on devices and what they take, a line each, for the start of a run."""
    width = max(len(role) for role in plan.placement.roles)
    total = len(plan.cluster.devices)
    lines = []
    for role, place in plan.placement.roles.items():
        here = set(place.devices)
        marks = " ".join(str(d) if d in here else "." for d in range(total))
        where = f"on {marks if total <= 16 else format_ranges(place.devices)}"
        how = format_cut(plan, role)
        lines.append(f"  {role:<{width}}  {where}" + (f"  {how}" if how != "whole" else ""))
    phase = plan.fullest.fullest
    lines.append(
        f"memory      up to {format_gib(phase.bytes)} of {format_gib(plan.fullest.memory)} GiB a "
        f"device, while {phase.role} {PHASE_VERBS.get(phase.phase, phase.phase)}"
    )
    if plan.host_bytes:
        size, parts = format_gib(plan.host_bytes), ", ".join(plan.host)
        lines.append(f"host memory up to {size} GiB of a node, for {parts}{_kept(plan)}")
    return lines


def _kept(plan: JobPlan) -> str:
    """Format on how many nodes a checkpoint is in memory."""
    if "checkpoint" not in plan.host:
        return ""
    if not (nodes := plan.nodes_of_a_copy):
        return ""
    if nodes == 1:
        return "; there is 1 node, and when it is lost the files are read"
    return f"; each checkpoint is on {nodes} nodes, of which {nodes - 1} may be lost"


def format_cut(plan: JobPlan, role: str) -> str:
    """Format how a role's model is cut: `dp=4 tp=2`."""
    if role not in plan.parameters and role != "generator":
        return "whole"
    place = plan.placement.roles[role]
    found = {"dp": len(place.devices) // model_parallel_size(place.parallel)}
    found |= {name: getattr(place.parallel, name) for name in ("ring", "ulysses", "pp", "tp")}
    if place.parallel.shards:
        found["shards"] = place.parallel.shards
    return " ".join(f"{name}={size}" for name, size in found.items() if size > 1) or "whole"


def format_ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: `0-3, 6` for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def format_count(number: int) -> str:
    """Format a number with three digits and a unit: 6,738,415,616 as `6.74B`."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
