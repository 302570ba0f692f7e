"""Settings with which a job fits its devices: what the planner chooses where a user leaves a
setting to it (`null`), what a search for a placement may change, and what would help a job that
does not fit. Each is planned before it is proposed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from hybridrl.checks.machine.placement_checks import resolve_placement
from hybridrl.config.changed import Setting, apply_changes
from hybridrl.config.role_models import list_parallel_settings
from hybridrl.config.schema import CHECKPOINTING_MODES, Config
from hybridrl.errors import ConfigError, NotPlannedError
from hybridrl.models.activation_checkpointing import KEPT_OPERATIONS
from hybridrl.placement import ACTOR_ROLE
from hybridrl.planner.computation_dtype import resolve_dtype
from hybridrl.planner.job_plan import JobPlan, build_job_plan
from hybridrl.planner.machine.cluster_rates import apply_vendor_rates
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.step.step_calls import SampleLengths
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.system.container_limits import count_usable_cores
from hybridrl.system.formatting import format_gib
from hybridrl.trainers.role_spec import RoleSpec

TOKENS, CHECKPOINTING = "actor.tokens_per_microbatch", "actor.gradient_checkpointing"
MOST_TOKENS = {"cpu": 16384, "cuda": 32768}
"""Of a micro-batch: with more of them nothing becomes quicker that counts."""
FILLED = 0.9
"""Of a device's memory, the share that a micro-batch may lead to."""
MOST_PROCESSES = 16
"""That score for a device: their start takes time and memory, too."""
HALVINGS = 2
"""Of `actor.tokens_per_microbatch`, that a search for a placement looks at, and that come before
layers are to keep less of their forward."""
KEPT = CHECKPOINTING_MODES[:-1]
"""Values of `actor.gradient_checkpointing` that the planner chooses from, the quickest first."""
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
    """Choose `actor.tokens_per_microbatch`, `actor.parallel.shards`, `rollout.memory_share` and
    `reward.processes` where they are null, and `actor.gradient_checkpointing` where it is `auto`.

    Args:
        config: With folders for models.
        cluster: With memory of its devices.
        lengths: Tokens of the longest prompt and response; None: those that are allowed.
        roles: Of the job; None: those of its trainer.
        is_elsewhere: Nodes may have other cores than this one, so that processes are left open.
    """
    job, found = _OpenJob(config, cluster, lengths, roles), list[Setting]()
    if config.reward.processes is None and not is_elsewhere:
        # The cores that each device has beside the one that its own program takes.
        cores = count_usable_cores() // cluster.devices_per_node
        found.append(("reward.processes", min(max(1, cores - 1), MOST_PROCESSES)))
    # Each sees what those before it chose; vLLM's share is what all others leave.
    for choose in (_choose_activations, _choose_shards, _choose_memory_share):
        found += choose(job, found)
    return found


@dataclass(frozen=True)
class _OpenJob:
    """A job with settings that are left to the planner; attributes as in
    `choose_automatic_settings`."""

    config: Config
    cluster: ClusterSpec
    lengths: SampleLengths | None
    roles: Mapping[str, RoleSpec] | None

    @property
    def is_searched(self) -> bool:
        """Return whether a search chooses its placement, and compares such settings itself."""
        return self.config.placement.strategy == "auto"

    def plan(
        self, settings: Iterable[Setting], rates: Sequence[DeviceRates] | None = None
    ) -> JobPlan:
        """Plan the job with these settings; raises a ConfigError where there is no such job."""
        config = apply_changes(self.config, settings)
        placement = resolve_placement(config, self.cluster, self.roles)
        return build_job_plan(config, self.cluster, placement, self.lengths, rates, self.roles)

    def has_room(self, plan: JobPlan) -> bool:
        """Return whether no phase of the job fills more than `FILLED` of a device. Those do in
        which vLLM has its share, if that is open and so takes what is left."""
        is_open = self.config.rollout.memory_share is None
        return plan.fits() and all(
            phase.bytes <= FILLED * device.memory
            for device in plan.memory
            for phase in device.phases
            if not (is_open and "vllm" in phase.parts)
        )


def _choose_activations(job: _OpenJob, chosen: list[Setting]) -> list[Setting]:
    """Choose that layers keep as much of their forward, and micro-batches have as many tokens, of
    powers of two, as there is room for. A search for a placement begins with the most of all, and
    lowers it where that lacks memory."""
    sizes, modes = list[list[Setting]]([[]]), list[list[Setting]]([[]])
    if job.config.actor.tokens_per_microbatch is None:
        sizes = [[(TOKENS, tokens)] for tokens in _token_choices(job)]
    if job.config.actor.gradient_checkpointing == "auto":
        modes = [[(CHECKPOINTING, kept)] for kept in _kept_choices(job.config)]
    if len(sizes) * len(modes) == 1 or job.is_searched:
        return [*sizes[0], *modes[0]]
    found = [*sizes[-1], *modes[0]]  # what is safest where nothing can be planned
    for mode in modes:
        for size in sizes if mode is modes[-1] else sizes[: HALVINGS + 1]:
            try:
                fits = job.has_room(job.plan([*chosen, *size, *mode]))
            except NotPlannedError:
                continue
            except ConfigError:  # told when the job is placed
                return found
            found = [*size, *mode]
            if fits:
                return found
    return found


def _token_choices(job: _OpenJob) -> list[int]:
    """List the numbers of tokens that a micro-batch may have, the most first."""
    data, rollout, lengths = job.config.data, job.config.rollout, job.lengths
    allowed = data.max_prompt_tokens + max(rollout.max_tokens, data.max_response_tokens or 0)
    longest = 2 * (allowed if lengths is None else lengths.prompt + lengths.longest)  # of a pair
    tokens = MOST_TOKENS[job.cluster.kind]
    while tokens < longest:
        tokens *= 2
    return [tokens, *_halved(tokens, longest)]


def _kept_choices(config: Config) -> list[str]:
    """List the values of `actor.gradient_checkpointing` with which layers keep less of their
    forward than now, or all if that is open."""
    cuts, now = list_parallel_settings(config).values(), config.actor.gradient_checkpointing
    has_ring = any(cut.ring > 1 for cut in cuts)
    modes = [kept for kept in KEPT if not (has_ring and kept in KEPT_OPERATIONS)]
    if now == "auto":
        return modes
    return modes[modes.index(now) + 1 :] if now in modes else []


def _choose_shards(job: _OpenJob, chosen: list[Setting]) -> list[Setting]:
    """Choose to share parameters within each node, with copies on the others, where a step is then
    planned to be quicker and memory has room."""
    cluster, parallel = job.cluster, job.config.actor.parallel
    if parallel.shards or job.is_searched or len(cluster.nodes) == 1:
        return []
    if (known := cluster if cluster.rates_known else apply_vendor_rates(cluster)) is None:
        return []
    rates = DeviceRates.known(known, resolve_dtype(job.config, cluster.kind).model.dtype)
    try:
        apart = job.plan(chosen, rates)
        place = apart.placement.roles.get(ACTOR_ROLE)
        nodes = Counter(cluster.devices[device].node for device in place.devices) if place else {}
        near, rest = divmod(min(nodes.values(), default=0), parallel.tp * parallel.pp)
        if len(nodes) == 1 or near < 2 or rest or len(set(nodes.values())) > 1:
            return []
        setting = ("actor.parallel.shards", near)
        copied = job.plan([*chosen, setting], rates)
    except (ConfigError, NotPlannedError):  # told when the job is placed
        return []
    quicker = copied.times and apart.times and copied.times.step < apart.times.step
    return [setting] if quicker and job.has_room(copied) else []


def _choose_memory_share(job: _OpenJob, chosen: list[Setting]) -> list[Setting]:
    """Choose vLLM's share of GPUs, unless none is large enough: then what would help is looked for
    with the share left open."""
    rollout = job.config.rollout
    is_open = rollout.memory_share is None and not job.is_searched
    if not (is_open and job.cluster.is_cuda and rollout.engine == "vllm"):
        return []
    share: float | None = UNPLANNED_MEMORY_SHARE
    with suppress(ConfigError):  # told when the job is placed
        plan = job.plan(chosen)
        share = None if plan.lacking else plan.memory_share
    return [] if share is None else [("rollout.memory_share", share)]


def search_variants(config: Config, cluster: ClusterSpec) -> list[tuple[Setting, ...]]:
    """Return what a search for a placement may change, from what costs nothing to what costs most
    time; first nothing."""
    actor = config.actor
    tokens: list[tuple[Setting, ...]] = [()]
    tokens += [((TOKENS, less),) for less in islice(_fewer_tokens(config), HALVINGS)]
    recompute: list[tuple[Setting, ...]] = [()]
    # `selective` saves little beside these, and each is so many ways more to look at.
    recompute += [((CHECKPOINTING, kept),) for kept in _kept_choices(config)[-2:]]
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
            f"has {format_gib(plan.fullest.memory)}"
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
    for kept in _kept_choices(config):
        yield CHECKPOINTING, kept
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


def _replanned(plan: JobPlan, settings: list[Setting]) -> JobPlan | None:
    """Plan the same roles with these settings; None if there is no such job."""
    sizes = plan.sizes
    lengths = SampleLengths(sizes.prompt_tokens, sizes.response_tokens, sizes.longest_response)
    try:
        return _OpenJob(plan.config, plan.cluster, lengths, plan.roles).plan(settings)
    except ConfigError:
        return None


def _fits(plan: JobPlan, settings: list[Setting]) -> bool:
    after = _replanned(plan, settings)
    return after is not None and after.fits()


def _badness(plan: JobPlan) -> tuple[bool, float]:
    return bool(plan.lacking), plan.fullest.filled


def format_settings(settings: Iterable[Setting]) -> list[str]:
    """Format settings as the command line takes them."""
    return [f"{name}={_text(value)}" for name, value in settings]


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
