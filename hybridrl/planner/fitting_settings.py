"""Settings with which a job fits its devices: what the planner chooses where a user leaves a
setting to it (`null`), what a search for a placement may change, and what would help a job that
does not fit. Each is planned before it is proposed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from hybridrl.checks.machine.placement_checks import resolve_placement
from hybridrl.config.changed import Setting, apply_changes
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, NotPlannedError
from hybridrl.planner.step.step_calls import SampleLengths
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.system.cpu_cores import count_usable_cores
from hybridrl.system.formatting import format_gib
from hybridrl.trainers.role_spec import RoleSpec

if TYPE_CHECKING:
    from hybridrl.planner.job_plan import JobPlan

TOKENS = "actor.tokens_per_microbatch"
MOST_TOKENS = {"cpu": 16384, "cuda": 32768}
"""Of a micro-batch: with more of them nothing becomes quicker that counts."""
FILLED = 0.9
"""Of a device's memory, the share that a micro-batch may lead to."""
MOST_PROCESSES = 16
"""That score for a device: their start takes time and memory, too."""
HALVINGS = 2
"""Of `actor.tokens_per_microbatch`, that a search for a placement looks at."""
KEEPS = ("none", "selective")
"""Values of `actor.gradient_checkpointing` with which activations are kept."""
UNPLANNED_MEMORY_SHARE = 0.5
"""`rollout.memory_share` of a job that cannot be planned."""
LARGEST_TP = 8
"""Beyond a node's links tensor parallelism is slower than anything else here."""


def choose_automatic_settings(
    config: Config,
    cluster: ClusterSpec,
    lengths: SampleLengths | None = None,
    roles: Mapping[str, RoleSpec] | None = None,
    *,
    is_elsewhere: bool = False,
) -> list[Setting]:
    """Choose `actor.tokens_per_microbatch`, `rollout.memory_share` and `reward.processes` where
    they are null.

    Micro-batches get the most tokens with which the job has room, of powers of two; a search for a
    placement begins with the most of all, and lowers it where that lacks memory.

    Args:
        config: With folders for models.
        cluster: With memory of its devices.
        lengths: Tokens of the longest prompt and response; None: those that are allowed.
        roles: Of the job; None: those of its trainer.
        is_elsewhere: Nodes may have other cores than this one, so that processes are left open.
    """
    found: list[Setting] = []
    if config.reward.processes is None and not is_elsewhere:
        # The cores that each device has beside the one that its own program takes.
        cores = count_usable_cores() // cluster.devices_per_node
        found.append(("reward.processes", min(max(1, cores - 1), MOST_PROCESSES)))
    if config.actor.tokens_per_microbatch is None:
        found += _choose_tokens(config, cluster, lengths, roles, found)
    return found + _choose_memory_share(config, cluster, lengths, roles, found)


def _choose_memory_share(
    config: Config,
    cluster: ClusterSpec,
    lengths: SampleLengths | None,
    roles: Mapping[str, RoleSpec] | None,
    chosen: list[Setting],
) -> list[Setting]:
    """Choose vLLM's share of GPUs, unless none is large enough: then what would help is looked for
    with the share left open. A search for a placement chooses it itself."""
    is_open = config.rollout.memory_share is None and config.placement.strategy != "auto"
    if not (is_open and cluster.is_cuda and config.rollout.engine == "vllm"):
        return []
    share: float | None = UNPLANNED_MEMORY_SHARE
    with suppress(ConfigError):  # told when the job is placed
        plan = _planned(config, cluster, lengths, roles, chosen)
        share = None if plan.lacking else plan.memory_share
    return [] if share is None else [("rollout.memory_share", share)]


def _choose_tokens(
    config: Config,
    cluster: ClusterSpec,
    lengths: SampleLengths | None,
    roles: Mapping[str, RoleSpec] | None,
    chosen: list[Setting],
) -> list[Setting]:
    data, rollout = config.data, config.rollout
    allowed = data.max_prompt_tokens + max(rollout.max_tokens, data.max_response_tokens or 0)
    longest = 2 * (allowed if lengths is None else lengths.prompt + lengths.longest)  # of a pair
    tokens = MOST_TOKENS[cluster.kind]
    while tokens < longest:
        tokens *= 2
    if config.placement.strategy == "auto":
        return [(TOKENS, tokens)]
    for less in _halved(tokens, longest):
        try:
            settings = [*chosen, (TOKENS, tokens)]
            if _planned(config, cluster, lengths, roles, settings).fits(FILLED):
                break
        except NotPlannedError:  # so few tokens are safest
            pass
        except ConfigError:  # told when the job is placed
            break
        tokens = less
    return [(TOKENS, tokens)]


def search_variants(config: Config, cluster: ClusterSpec) -> list[tuple[Setting, ...]]:
    """Return what a search for a placement may change, from what costs nothing to what costs most
    time; first nothing."""
    actor = config.actor
    tokens: list[tuple[Setting, ...]] = [()]
    tokens += [((TOKENS, less),) for less in islice(_fewer_tokens(config), HALVINGS)]
    recompute: list[tuple[Setting, ...]] = [()]
    if actor.gradient_checkpointing in KEEPS:
        recompute.append((("actor.gradient_checkpointing", "full"),))
    between = () if actor.offload_between_calls else (("actor.offload_between_calls", True),)
    optimizer = () if actor.offload_optimizer else (("actor.offload_optimizer", True),)
    offload: list[tuple[Setting, ...]] = [()]
    if cluster.is_cuda:
        offload += [between, (*between, *optimizer)]
    return [
        (*less, *again, *moved)
        for moved, again, less in product(dict.fromkeys(offload), recompute, tokens)
    ]


def _halved(tokens: int, least: float) -> Iterator[int]:
    """Yield halves of a number of tokens while they are not less than this."""
    while (tokens := tokens // 2) >= least:
        yield tokens


def _fewer_tokens(config: Config) -> Iterator[int]:
    """Yield halves of `actor.tokens_per_microbatch` that still hold the longest sample."""
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    return _halved(config.actor.tokens_per_microbatch or 0, longest)


def find_fitting_settings(plan: JobPlan) -> list[list[Setting]]:
    """Find every single setting with which the job fits, cheapest first; if there is none, a
    shortest combination that fits."""
    alone: dict[str, list[Setting]] = {}
    for cure in list_candidates(plan):
        if cure[0] not in alone and _fits(plan, [cure]):
            alone[cure[0]] = [cure]
    if alone:
        return list(alone.values())
    together, before = list[Setting](), plan
    for cure in list_candidates(plan):
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


def check_plan_fits(plan: JobPlan, tolerance: float = 1.0) -> None:
    """Raise if a plan does not fit, and name the settings with which it would.

    Raises:
        ConfigError: a sentence with what is missing where, and with what it would fit.
    """
    if plan.fits(tolerance):
        return
    what = plan.lacking
    if not what:
        phase = plan.fullest.fullest
        parts = sorted(phase.parts.items(), key=lambda part: -part[1])[:3]
        mostly = ", ".join(f"{name} {format_gib(size)}" for name, size in parts)
        what = (
            f"This does not fit: while `{phase.role}` does `{phase.phase}`, device "
            f"{plan.fullest.devices[0]} needs {format_gib(phase.bytes)} GiB ({mostly}, ...) and "
            f"has {format_gib(plan.cluster.memory_of(plan.fullest.devices[0]))}"
        )
    found = [" ".join(format_settings(cure)) for cure in find_fitting_settings(plan)]
    if not found:
        more = "more devices"
        if plan.lacking:  # of a copy for each rollout.parallel.tp devices
            more = "devices with more memory, or more of them and a larger rollout.parallel.tp"
        raise ConfigError(f"{what}. No single setting helps: take {more}, or a smaller model.")
    raise ConfigError(f"{what}. It would fit with {'; or with '.join(found)}.")


def list_candidates(plan: JobPlan) -> Iterator[Setting]:
    """Yield candidate settings, from those that cost nothing to those that cost most time."""
    config, is_cuda = plan.config, plan.cluster.is_cuda
    actor, rollout = config.actor, config.rollout
    for tokens in _fewer_tokens(config):
        yield TOKENS, tokens
    if rollout.engine != "vllm":
        for divisor in (2, 4, 8, 16):
            yield "rollout.max_sequences", max(1, rollout.max_sequences // divisor)
    elif not is_cuda:
        for divisor in (2, 4, 8):
            yield "rollout.kv_cache_gib", rollout.kv_cache_gib / divisor
    elif rollout.memory_share is not None:
        yield "rollout.memory_share", None
    if actor.gradient_checkpointing in KEEPS:
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


def _planned(
    config: Config,
    cluster: ClusterSpec,
    lengths: SampleLengths | None,
    roles: Mapping[str, RoleSpec] | None,
    settings: list[Setting],
) -> JobPlan:
    """Plan a job with these settings; raises a ConfigError where there is no such job."""
    from hybridrl.planner.job_plan import build_job_plan

    config = apply_changes(config, settings)
    placement = resolve_placement(config, cluster, roles)
    return build_job_plan(config, cluster, placement, lengths, roles=roles)


def _replanned(plan: JobPlan, settings: list[Setting]) -> JobPlan | None:
    """Plan the same roles with these settings; None if there is no such job."""
    sizes = plan.sizes
    lengths = SampleLengths(sizes.prompt_tokens, sizes.response_tokens, sizes.longest_response)
    try:
        return _planned(plan.config, plan.cluster, lengths, plan.roles, settings)
    except ConfigError:
        return None


def _fits(plan: JobPlan, settings: list[Setting]) -> bool:
    after = _replanned(plan, settings)
    return after is not None and after.fits()


def _badness(plan: JobPlan) -> tuple[bool, float]:
    return bool(plan.lacking), plan.filled(plan.fullest)


def format_settings(settings: Iterable[Setting]) -> list[str]:
    """Format settings as the command line takes them."""
    return [f"{name}={_text(value)}" for name, value in settings]


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
