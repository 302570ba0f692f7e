"""What all roles on a device take of it together, call by call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hybridrl.core.device import message_bytes
from hybridrl.placement import GENERATOR
from hybridrl.planner import memory
from hybridrl.planner.devices import GIB
from hybridrl.planner.memory import Parts
from hybridrl.planner.planner import Planner, shape_at
from hybridrl.trainers.role_spec import SCORING

PROCESS = {"cpu": 0.5 * GIB, "cuda": 1.5 * GIB}
"""Of a process that holds nothing yet: on CPUs what Python, torch and transformers have loaded and
keep, on GPUs the context, the kernels and the buffers of NCCL."""
VLLM_PROCESS = {"cpu": 0.35 * GIB, "cuda": 0.0}
"""What importing vLLM adds."""
ENGINE_ROOM = GIB
"""What vLLM takes of its share on a GPU beside weights and cache: activations, captured graphs."""


@dataclass(frozen=True)
class PhaseMemory:
    """The fullest moment of a device while a role works.

    Attributes:
        parts: Bytes by what they are for, of all roles on the device.
    """

    role: str
    phase: str
    parts: Mapping[str, float]

    @property
    def bytes(self) -> float:
        """All of them."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class DeviceMemory:
    """Devices that hold the same.

    Attributes:
        devices: Their numbers.
        phases: Of each role in turn.
    """

    devices: tuple[int, ...]
    phases: tuple[PhaseMemory, ...]

    @property
    def fullest(self) -> PhaseMemory:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.bytes)


def memory_of(planner: Planner) -> list[DeviceMemory]:
    """Of every device on which a role lives."""
    alike: defaultdict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for device in range(len(planner.machines.cluster.devices)):
        here = tuple(
            (role, planner.stages(role)[place.devices.index(device)])
            for role, place in planner.placement.roles.items()
            if device in place.devices
        )
        alike[here].append(device)
    return [
        DeviceMemory(tuple(devices), tuple(_phases(planner, dict(here))))
        for here, devices in alike.items()
        if here
    ]


def lacking_of(planner: Planner) -> str:
    """A sentence if the generator's share of a GPU has no room for what it must hold."""
    if not planner.generators or not planner.sleeps:
        return ""
    shapes = [planner.generation_shape(role) for role in planner.generators]
    share, tokens = planner.config.rollout.memory_share, planner.sizes.sample_tokens
    least = ENGINE_ROOM + max(
        memory.generation_copy(shape, planner.config.rollout.quantization)
        + memory.cache_bytes(shape, tokens)
        for shape in shapes
    )
    room = share * planner.machines.memory
    if room >= least:
        return ""
    return (
        f"rollout.memory_share={share} of a device is {room / GIB:.1f} GiB, but the generator's "
        f"weights with the cache of one sample take {least / GIB:.1f}"
    )


def _phases(planner: Planner, stages: Mapping[str, int]) -> Iterable[PhaseMemory]:
    """Of the roles on a device, each a stage of its pipeline."""
    process = PROCESS[planner.machines.cluster.kind]
    if planner.generators & stages.keys() and planner.config.rollout.engine == "vllm":
        process += VLLM_PROCESS[planner.machines.cluster.kind]
    stays = {"": {"process": process}}
    stays |= {role: _resident(planner, role, stage) for role, stage in stages.items()}
    offloaded = planner.machines.is_cuda and planner.config.actor.offload_between_calls
    found = {(phase.role, phase.phase): phase for phase in _loads(planner, stages, process)}
    for call in planner.calls:
        role, phase = call.role, call.phase
        if role not in stages:
            continue
        there = [stays[""], stays[role]]
        if not offloaded:
            there = [*stays.values()]
        parts = _sum([*there, _working(planner, role, stages[role], phase)])
        found[role, phase] = PhaseMemory(role, phase, parts)
    # Roles without a model that are never called are idle.
    return found.values() or [PhaseMemory(next(iter(stages)), "idle", _sum(stays.values()))]


def _loads(planner: Planner, stages: Mapping[str, int], process: float) -> Iterable[PhaseMemory]:
    """Roles on a device are built one after the other, each beside what was built before. vLLM
    takes its share whole, and sleeps once it is there."""
    before: Parts = {"process": process}
    for role, stage in stages.items():
        if not (own := _loaded(planner, role, stage)) and role not in planner.generators:
            continue
        before = _sum([before, own])
        awake = {}
        if planner.sleeps and role in planner.generators:
            awake = _generating(planner, role, "generate")
        yield PhaseMemory(role, "load", _sum([before, awake]))


def _loaded(planner: Planner, role: str, stage: int) -> Parts:
    """What a role has on a device once it is built: no moments yet, which come with the first
    update, and no copies for checkpoints."""
    found = _resident(planner, role, stage)
    return {name: size for name, size in found.items() if name not in ("optimizer", "checkpoint")}


def _resident(planner: Planner, role: str, stage: int) -> Parts:
    """What a role has on a device between calls."""
    rollout, found = planner.config.rollout, Parts()
    if role != GENERATOR and planner.has_model(role):
        found = planner.part(role, stage).resident()
    if not planner.machines.is_cuda and (size := planner.checkpoint_bytes(role)):
        found["checkpoint"] = size
    if not planner.machines.is_cuda and (size := planner.record_bytes(role)):
        found["weight record"] = size
    if role in planner.generators and not planner.sleeps:
        found["generation copy"] = memory.generation_copy(
            planner.generation_shape(role), rollout.quantization
        )
        if rollout.engine == "vllm":
            found["kv_cache"] = rollout.kv_cache_gib * GIB
    kind = None if role == GENERATOR else planner.roles[role].worker
    judge = getattr(planner.config, str(kind)).judge if kind in SCORING else None
    if judge is not None and judge.path:
        if planner.sleeps:
            found["judge"] = judge.memory_share * planner.machines.memory
        else:
            copy = memory.generation_copy(shape_at(judge.path, planner.config))
            found["judge"] = copy + rollout.kv_cache_gib * GIB
    return found


def _working(planner: Planner, role: str, stage: int, phase: str) -> Parts:
    """What a phase adds."""
    if phase in ("sync", "generate"):
        return _generating(planner, role, phase)
    if not planner.has_model(role):
        return {}
    part, batch = planner.part(role, stage), planner.batches[role, phase]
    return (part.training if phase == "train" else part.scoring)(batch, planner.sizes)


def _generating(planner: Planner, role: str, phase: str) -> Parts:
    rollout, shape = planner.config.rollout, planner.generation_shape(role)
    found: Parts = {}
    if phase == "sync":  # at most all that comes in and goes out
        room = message_bytes(planner.machines.cluster.kind)
        found["messages"] = min(room, 2 * planner.sync_bytes(role))
    if planner.sleeps:
        found["generation copy"] = memory.generation_copy(shape, rollout.quantization)
        if phase == "generate":
            room = rollout.memory_share * planner.machines.memory - found["generation copy"]
            found["kv_cache"] = max(0.0, room)
    elif rollout.engine != "vllm" and phase == "generate":
        replicas = len(planner.placement.roles[role].devices) // planner.rollout_tp(role)
        rows = min(-(-planner.sizes.samples // replicas), rollout.max_sequences)
        return memory.generating_with_transformers(shape, planner.sizes, rows)
    return found


def _sum(several: Iterable[Parts]) -> Parts:
    found: defaultdict[str, float] = defaultdict(float)
    for parts in several:
        for name, size in parts.items():
            found[name] += size
    return dict(found)
