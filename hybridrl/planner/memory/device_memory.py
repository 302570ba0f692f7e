"""The memory that all roles on a device take together, call by call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hybridrl.models.activation_checkpointing import OFFLOAD_CHECKPOINTING
from hybridrl.placement import GENERATOR_ROLE
from hybridrl.planner.job_roles import VLLM_BYTES, JobRoles, load_model_shape
from hybridrl.planner.machine.device_catalog import GIB
from hybridrl.planner.memory.generation_memory import (
    estimate_transformers_generation,
    generation_copy_bytes,
    kv_cache_bytes,
)
from hybridrl.planner.memory.model_part import MemoryParts
from hybridrl.system.device_traits import default_bucket_bytes, round_pinned_bytes
from hybridrl.system.formatting import format_bytes
from hybridrl.trainers.role_spec import SCORING_WORKERS

_PROCESS_BYTES = {"cpu": 0.5 * GIB, "cuda": 1.5 * GIB}
"""Of a process that holds nothing yet: on CPUs what Python, torch and transformers have loaded and
keep, on GPUs the context, the kernels and the buffers of NCCL."""
_VLLM_IMPORT_BYTES = {"cpu": 0.35 * GIB, "cuda": 0.0}
"""What importing vLLM adds."""
FREE_SHARE = 0.05
"""Of a device's memory, what a plan that may choose leaves free."""
MEMORY_SHARES = tuple(percent / 100 for percent in range(90, 5, -5))
"""Values of `rollout.memory_share` to choose from."""
_ENGINE_PARTS = ("generation copy", "kv_cache", "vllm")
"""Names of the parts that make up vLLM's share."""


@dataclass(frozen=True)
class PhaseMemory:
    """The peak memory of a device while one role works.

    Attributes:
        parts: Bytes by what they are for, of all roles on the device.
    """

    role: str
    phase: str
    parts: Mapping[str, float]

    @property
    def bytes(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryEstimate:
    """The predicted memory of a group of devices that hold the same roles.

    Attributes:
        devices: Their numbers.
        phases: Of each role in turn.
        memory: Bytes that each of them has.
    """

    devices: tuple[int, ...]
    phases: tuple[PhaseMemory, ...]
    memory: float

    @property
    def fullest(self) -> PhaseMemory:
        """Return the phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def filled(self) -> float:
        """Return the share of memory in use at the peak."""
        return self.fullest.bytes / self.memory


def estimate_device_memory(planner: JobRoles) -> list[MemoryEstimate]:
    """Estimate the memory of every device that holds a role; equal devices are one entry."""
    alike: defaultdict[tuple[tuple[tuple[str, int], ...], str], list[int]] = defaultdict(list)
    for device, made in enumerate(planner.cluster.devices):
        here = tuple(
            (role, planner.stages(role)[place.devices.index(device)])
            for role, place in planner.placement.roles.items()
            if device in place.devices
        )
        alike[here, made.model].append(device)
    found = []
    for (here, model), devices in alike.items():
        if here:
            memory = planner.cluster.models[model].memory
            phases = tuple(_phases(planner, dict(here), memory))
            found.append(MemoryEstimate(tuple(devices), phases, memory))
    return found


def find_generator_shortage(planner: JobRoles) -> str:
    """Return a sentence if the generator's share of a GPU cannot hold its weights and the cache of
    one sample; else an empty one."""
    if not planner.generators or not planner.sleeps:
        return ""
    shapes = [planner.generation_shape(role) for role in planner.generators]
    share, rollout = planner.memory_share or 0.0, planner.config.rollout
    least = VLLM_BYTES + max(
        generation_copy_bytes(shape, rollout.quantization)
        + kv_cache_bytes(shape, planner.sizes.sample_tokens, rollout.kv_cache)
        for shape in shapes
    )
    places = [planner.placement.roles[role].devices for role in planner.generators]
    room = share * min(planner.cluster.memory_of(device) for place in places for device in place)
    if room >= least:
        return ""
    return (
        f"rollout.memory_share={share:g} of a device is {format_bytes(room)}, but the generator's "
        f"weights with the cache of one sample take {format_bytes(least)}"
    )


def choose_memory_share(planner: JobRoles, memory: Sequence[MemoryEstimate]) -> float:
    """Return the largest `rollout.memory_share` that leaves room for all that is on a device while
    vLLM starts, and while it generates; the smallest there is if none does.

    Args:
        memory: With any share.
    """
    taken = max(
        sum(size for name, size in phase.parts.items() if name not in _ENGINE_PARTS) / device.memory
        for device in memory
        for phase in device.phases
        if "vllm" in phase.parts
    )
    fitting = (share for share in MEMORY_SHARES if share + taken <= 1 - FREE_SHARE)
    return next(fitting, MEMORY_SHARES[-1])


def estimate_host_memory(planner: JobRoles) -> MemoryParts:
    """Estimate what roles keep in the memory of the node that has most of it, beside the memory of
    its processes: what is offloaded, in pinned memory, and copies of weights and checkpoints."""
    taken: defaultdict[str, list[MemoryParts]] = defaultdict(list)
    for role, place in planner.placement.roles.items():
        of_stage = [_hosted(planner, role, stage) for stage in range(place.parallel.pp)]
        for device, stage in zip(place.devices, planner.stages(role), strict=True):
            taken[planner.cluster.devices[device].node].append(of_stage[stage])
    nodes = map(_sum, taken.values())
    return max(nodes, key=lambda parts: sum(parts.values()), default={})


def _hosted(planner: JobRoles, role: str, stage: int) -> MemoryParts:
    """Return what a role keeps in host memory for one device of a pipeline stage."""
    is_cuda, actor = planner.cluster.is_cuda, planner.config.actor
    found = {"weight record": planner.record_bytes(role)}
    found["checkpoint"] = planner.checkpoint_bytes(role)
    if is_cuda:  # that which is written is one pinned tensor
        copy = found["checkpoint"] / (1 + 2 * planner.nodes_of_a_copy)
        found["checkpoint"] += round_pinned_bytes(copy) - copy
    if is_cuda and role != GENERATOR_ROLE and planner.has_model(role):
        part, batch = planner.part(role, stage), planner.batches.get((role, "train"))
        found |= part.hosted(actor.offload_between_calls)
        if part.checkpointing == OFFLOAD_CHECKPOINTING and batch is not None:
            states = round_pinned_bytes(batch.tokens * part.shape.hidden * part.shape.item)
            found["activations"] = states * part.layers * part.micro_batches_held
    return {name: size for name, size in found.items() if size}


@dataclass(frozen=True)
class RoleMemory:
    """The memory that a role takes on a device of one pipeline stage.

    Attributes:
        resident: Between calls.
        loaded: Once it is built: no moments yet, which come with the first update, and no copies
            for checkpoints.
        awake: Of a generator that sleeps later, while it is built: vLLM takes its share whole.
        working: What each phase adds.
    """

    resident: MemoryParts
    loaded: MemoryParts
    awake: MemoryParts
    working: Mapping[str, MemoryParts]


def estimate_role_memory(planner: JobRoles, role: str, stage: int, memory: float) -> RoleMemory:
    """Estimate the memory of a role on a device.

    Args:
        memory: Bytes that the device has.
    """
    resident = _resident(planner, role, stage, memory)
    phases = dict.fromkeys(call.phase for call in planner.calls if call.role == role)
    awakes = planner.sleeps and role in planner.generators
    return RoleMemory(
        resident,
        {n: size for n, size in resident.items() if n not in ("optimizer", "checkpoint")},
        _generating(planner, role, "generate", memory) if awakes else {},
        {phase: _working(planner, role, stage, phase, memory) for phase in phases},
    )


def estimate_process_bytes(planner: JobRoles, roles: Collection[str]) -> float:
    """Estimate the bytes of a device's process with these roles before they are built."""
    kind = planner.cluster.kind
    generates = planner.generators.intersection(roles)
    is_vllm = generates and planner.config.rollout.engine == "vllm"
    return _PROCESS_BYTES[kind] + (_VLLM_IMPORT_BYTES[kind] if is_vllm else 0.0)


def _phases(planner: JobRoles, stages: Mapping[str, int], memory: float) -> Iterable[PhaseMemory]:
    """List the memory of each phase of the roles on a device, each with its pipeline stage."""
    process = {"process": estimate_process_bytes(planner, stages)}
    taken = {
        role: estimate_role_memory(planner, role, stage, memory) for role, stage in stages.items()
    }
    found = {}
    before: MemoryParts = process
    for role, own in taken.items():  # built one after the other, each beside those before
        if own.loaded or role in planner.generators:
            before = _sum([before, own.loaded])
            found[role, "load"] = PhaseMemory(role, "load", _sum([before, own.awake]))
    offloaded = planner.cluster.is_cuda and planner.config.actor.offload_between_calls
    for role, phase in ((call.role, call.phase) for call in planner.calls if call.role in taken):
        there = [taken[role]] if offloaded else list(taken.values())
        parts = [process, *(own.resident for own in there), taken[role].working[phase]]
        found[role, phase] = PhaseMemory(role, phase, _sum(parts))
    # Roles without a model that are never called are idle.
    idle = _sum([process, *(own.resident for own in taken.values())])
    return found.values() or [PhaseMemory(next(iter(stages)), "idle", idle)]


def _resident(planner: JobRoles, role: str, stage: int, memory: float) -> MemoryParts:
    """Return what a role keeps on a device between calls."""
    rollout, found = planner.config.rollout, MemoryParts()
    if role != GENERATOR_ROLE and planner.has_model(role):
        found = planner.part(role, stage).resident()
    if not planner.cluster.is_cuda and (size := planner.checkpoint_bytes(role)):
        found["checkpoint"] = size
    if not planner.cluster.is_cuda and (size := planner.record_bytes(role)):
        found["weight record"] = size
    if role in planner.generators and not planner.sleeps:
        found["generation copy"] = generation_copy_bytes(
            planner.generation_shape(role), rollout.quantization
        )
        if rollout.engine == "vllm":
            found["kv_cache"] = rollout.kv_cache_gib * GIB
    kind = None if role == GENERATOR_ROLE else planner.roles[role].worker
    judge = getattr(planner.config, str(kind)).judge if kind in SCORING_WORKERS else None
    if judge is not None and judge.path:
        if planner.sleeps:
            found["judge"] = judge.memory_share * memory + _PROCESS_BYTES["cuda"]
        else:
            copy = generation_copy_bytes(load_model_shape(judge.path, planner.config))
            found["judge"] = copy + rollout.kv_cache_gib * GIB
    return found


def _working(planner: JobRoles, role: str, stage: int, phase: str, memory: float) -> MemoryParts:
    """Return what a phase adds to the resident memory of a role."""
    if phase in ("sync", "generate"):
        return _generating(planner, role, phase, memory)
    if not planner.has_model(role):
        return {}
    part, batch = planner.part(role, stage), planner.batches[role, phase]
    return (part.training if phase == "train" else part.scoring)(batch)


def _generating(planner: JobRoles, role: str, phase: str, memory: float) -> MemoryParts:
    rollout, shape = planner.config.rollout, planner.generation_shape(role)
    found: MemoryParts = {}
    if phase == "sync":  # at most all that comes in and goes out
        most = default_bucket_bytes(planner.cluster.kind)
        found["messages"] = min(most, 2 * planner.sync_bytes(role))
    if planner.sleeps:
        found["generation copy"] = generation_copy_bytes(shape, rollout.quantization)
        if phase == "generate":
            found["kv_cache"] = planner.cache_bytes(role, memory)
            found["vllm"] = VLLM_BYTES
    elif rollout.engine != "vllm" and phase == "generate":
        replicas = len(planner.placement.roles[role].devices) // planner.rollout_tp(role)
        rows = min(-(-planner.sizes.samples // replicas), rollout.max_sequences)
        return estimate_transformers_generation(shape, planner.sizes, rows)
    return found


def _sum(several: Iterable[MemoryParts]) -> MemoryParts:
    found: defaultdict[str, float] = defaultdict(float)
    for parts in several:
        for name, size in parts.items():
            found[name] += size
    return dict(found)
