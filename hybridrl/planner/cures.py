"""Settings with which a job that does not fit would fit, cheapest first; each is planned again."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.planner.devices import GIB, Machines
from hybridrl.planner.plan import Plan, make_plan

SHARES = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
LARGEST_TP = 8
"""Beyond a node's links tensor parallelism is slower than anything else here."""

Setting = tuple[str, Any]


def cures(
    config: Config, machines: Machines, lengths: tuple[float, float] | None = None
) -> list[list[Setting]]:
    """Every single setting with which the job fits, cheapest first; if none does, the shortest
    run of them that does together, less what it can spare."""
    candidates = list(_candidates(config, machines))
    alone = [[cure] for cure in candidates if _fits(config, machines, [cure], lengths)]
    if alone:
        names = [cure[0][0] for cure in alone]
        return [cure for n, cure in enumerate(alone) if cure[0][0] not in names[:n]]
    together: list[Setting] = []
    for cure in candidates:
        trial = [c for c in together if c[0] != cure[0]] + [cure]
        before, after = (_plan(config, machines, c, lengths) for c in (together, trial))
        if after is None or (before is not None and not _is_better(after, before)):
            continue
        together = trial
        if after.fits():
            spare = list(together)
            for one in spare:
                fewer = [c for c in together if c != one]
                if _fits(config, machines, fewer, lengths):
                    together = fewer
            return [together]
    return []


def refuse(
    plan: Plan,
    config: Config,
    machines: Machines,
    lengths: tuple[float, float] | None = None,
    tolerance: float = 1.0,
) -> None:
    """Says no to a plan that does not fit.

    Raises:
        ConfigError: a sentence with what is missing where, and with what it would fit.
    """
    if not plan.fits(tolerance):
        raise ConfigError(_refusal(plan, config, machines, lengths))


def _refusal(
    plan: Plan, config: Config, machines: Machines, lengths: tuple[float, float] | None
) -> str:
    device = max(plan.memory, key=lambda device: device.fullest.bytes)
    phase = device.fullest
    if plan.lacking:
        what = "; ".join(plan.lacking)
    else:
        parts = sorted(phase.parts.items(), key=lambda part: -part[1])[:3]
        mostly = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
        what = (
            f"This does not fit: while `{phase.role}` does `{phase.phase}`, device "
            f"{device.devices[0]} needs {phase.bytes / GIB:.1f} GiB ({mostly}, ...) and has "
            f"{machines.memory / GIB:.1f}"
        )
    found = [
        " ".join(f"{k}={_text(v)}" for k, v in cure) for cure in cures(config, machines, lengths)
    ]
    if not found:
        return f"{what}. No single setting helps: take more devices, or a smaller model."
    return f"{what}. It would fit with {'; or with '.join(found)}."


def changed(config: Config, settings: list[Setting]) -> Config:
    """The configuration with these settings."""
    config = copy.deepcopy(config)
    for name, value in settings:
        *groups, leaf = name.split(".")
        place: Any = config
        for group in groups:
            place = getattr(place, group)
        setattr(place, leaf, value)
    return config


def _candidates(config: Config, machines: Machines) -> Iterator[Setting]:
    """From what costs nothing to what costs most time."""
    actor, rollout = config.actor, config.rollout
    longest = config.data.max_prompt_tokens + rollout.max_tokens
    tokens = actor.tokens_per_microbatch // 2
    while tokens >= longest:
        yield "actor.tokens_per_microbatch", tokens
        tokens //= 2
    if machines.is_cuda and rollout.engine == "vllm":
        for share in SHARES:
            yield "rollout.memory_share", share
    elif rollout.engine == "vllm":
        for divisor in (2, 4, 8):
            yield "rollout.kv_cache_gib", rollout.kv_cache_gib / divisor
    else:
        for divisor in (2, 4, 8, 16):
            yield "rollout.max_sequences", max(1, rollout.max_sequences // divisor)
    if not actor.gradient_checkpointing:
        yield "actor.gradient_checkpointing", True
    if rollout.engine == "vllm":
        yield from _doubled("rollout.parallel.tp", rollout.parallel.tp)
    if machines.is_cuda and not actor.offload_between_calls:
        yield "actor.offload_between_calls", True
    if machines.is_cuda and not actor.offload_optimizer:
        yield "actor.offload_optimizer", True
    yield from _doubled("actor.parallel.tp", actor.parallel.tp)
    if machines.is_cuda and not actor.offload_parameters:
        yield "actor.offload_parameters", True
    if config.placement.strategy not in ("flattening", "interleaving"):
        yield "placement.strategy", "flattening"


def _doubled(name: str, size: int) -> Iterator[Setting]:
    while size < LARGEST_TP:
        size *= 2
        yield name, size


def _plan(
    config: Config,
    machines: Machines,
    settings: list[Setting],
    lengths: tuple[float, float] | None,
) -> Plan | None:
    """None: there is no such job."""
    try:
        return make_plan(changed(config, settings), machines, lengths=lengths)
    except ConfigError:
        return None


def _fits(config: Config, machines: Machines, settings: list[Setting], lengths: Any) -> bool:
    plan = _plan(config, machines, settings, lengths)
    return plan is not None and plan.fits()


def _is_better(after: Plan, before: Plan) -> bool:
    return (len(after.lacking), after.fullest) < (len(before.lacking), before.fullest)


def _text(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
