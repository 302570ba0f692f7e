"""Settings with which a job that does not fit would fit, cheapest first; each is planned again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hybridrl.config.changed import Setting, changed
from hybridrl.errors import ConfigError
from hybridrl.planner.step.step_calls import Lengths
from hybridrl.system.formatting import gib

if TYPE_CHECKING:
    from hybridrl.planner.job_plan import Plan

SHARES = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
LARGEST_TP = 8
"""Beyond a node's links tensor parallelism is slower than anything else here."""


def cures(plan: Plan) -> list[list[Setting]]:
    """Every single setting with which the job fits, cheapest first; if none does, the shortest
    run of them that does together, less what it can spare."""
    alone: dict[str, list[Setting]] = {}
    for cure in _candidates(plan):
        if cure[0] not in alone and _fits(plan, [cure]):
            alone[cure[0]] = [cure]
    if alone:
        return list(alone.values())
    together, before = list[Setting](), plan
    for cure in _candidates(plan):
        trial = [c for c in together if c[0] != cure[0]] + [cure]
        after = _replanned(plan, trial)
        if after is None or _badness(after) >= _badness(before):
            continue
        together, before = trial, after
        if after.fits():
            for one in trial:
                fewer = [c for c in together if c != one]
                if _fits(plan, fewer):
                    together = fewer
            return [together]
    return []


def refuse(plan: Plan, tolerance: float = 1.0) -> None:
    """Says no to a plan that does not fit.

    Raises:
        ConfigError: a sentence with what is missing where, and with what it would fit.
    """
    if plan.fits(tolerance):
        return
    what = plan.lacking
    if not what:
        phase = plan.fullest.fullest
        parts = sorted(phase.parts.items(), key=lambda part: -part[1])[:3]
        mostly = ", ".join(f"{name} {gib(size)}" for name, size in parts)
        what = (
            f"This does not fit: while `{phase.role}` does `{phase.phase}`, device "
            f"{plan.fullest.devices[0]} needs {gib(phase.bytes)} GiB ({mostly}, ...) and has "
            f"{gib(plan.cluster.memory_of(plan.fullest.devices[0]))}"
        )
    found = [" ".join(f"{name}={_text(value)}" for name, value in cure) for cure in cures(plan)]
    if not found:
        more = "more devices"
        if plan.lacking:  # of a copy for each rollout.parallel.tp devices
            more = "devices with more memory, or more of them and a larger rollout.parallel.tp"
        raise ConfigError(f"{what}. No single setting helps: take {more}, or a smaller model.")
    raise ConfigError(f"{what}. It would fit with {'; or with '.join(found)}.")


def _candidates(plan: Plan) -> Iterator[Setting]:
    """From what costs nothing to what costs most time."""
    config, is_cuda = plan.config, plan.cluster.is_cuda
    actor, rollout = config.actor, config.rollout
    longest = config.data.max_prompt_tokens + rollout.max_tokens
    tokens = actor.tokens_per_microbatch // 2
    while tokens >= longest:
        yield "actor.tokens_per_microbatch", tokens
        tokens //= 2
    if rollout.engine != "vllm":
        for divisor in (2, 4, 8, 16):
            yield "rollout.max_sequences", max(1, rollout.max_sequences // divisor)
    elif is_cuda:
        for share in SHARES:
            yield "rollout.memory_share", share
    else:
        for divisor in (2, 4, 8):
            yield "rollout.kv_cache_gib", rollout.kv_cache_gib / divisor
    if actor.gradient_checkpointing in ("none", "selective"):
        yield "actor.gradient_checkpointing", True
    if rollout.engine == "vllm":
        # Where the generator's weights are too large for a device, nothing else helps.
        most = max(LARGEST_TP, len(plan.cluster.devices)) if plan.lacking else LARGEST_TP
        yield from _doubled("rollout.parallel.tp", rollout.parallel.tp, most)
    if is_cuda and not actor.offload_between_calls:
        yield "actor.offload_between_calls", True
    if is_cuda and not actor.offload_optimizer:
        yield "actor.offload_optimizer", True
    yield from _doubled("actor.parallel.tp", actor.parallel.tp)
    if is_cuda and not actor.offload_parameters:
        yield "actor.offload_parameters", True
    if config.placement.strategy not in ("flattening", "interleaving"):
        yield "placement.strategy", "flattening"


def _doubled(name: str, size: int, most: int = LARGEST_TP) -> Iterator[Setting]:
    while 2 * size <= most:
        size *= 2
        yield name, size


def _replanned(plan: Plan, settings: list[Setting]) -> Plan | None:
    """The same roles with these settings; None: there is no such job."""
    from hybridrl.checks.machine.placement_checks import check_placement
    from hybridrl.planner.job_plan import make_plan

    config = changed(plan.config, settings)
    sizes = plan.sizes
    lengths = Lengths(sizes.prompt_tokens, sizes.response_tokens, sizes.longest_response)
    try:
        placement = check_placement(config, plan.cluster, plan.roles)
        return make_plan(config, plan.cluster, placement, lengths, roles=plan.roles)
    except ConfigError:
        return None


def _fits(plan: Plan, settings: list[Setting]) -> bool:
    after = _replanned(plan, settings)
    return after is not None and after.fits()


def _badness(plan: Plan) -> tuple[bool, float]:
    return bool(plan.lacking), plan.filled(plan.fullest)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
