"""A plan: where every role lives, what it takes there, how long a step will last. Plain data."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from transformers import PretrainedConfig

from hybridrl.config.placement_checks import LEARNERS, check_placement
from hybridrl.config.schema import Config, LoraSettings, ParallelConfig
from hybridrl.core.training_mesh import training_mesh
from hybridrl.models import load_config
from hybridrl.placement import GENERATOR, Placement
from hybridrl.planner import memory
from hybridrl.planner.dataflow import (
    Call,
    MicroBatches,
    Sizes,
    calls_of,
    has_model,
    micro_batches,
    sizes_of,
)
from hybridrl.planner.devices import GIB, Machines
from hybridrl.planner.memory import ModelPart, Parts, total
from hybridrl.planner.model_shape import ModelShape, shape_of
from hybridrl.planner.step_time import Rates, Times, estimate

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
        return total(self.parts)


@dataclass(frozen=True)
class DeviceMemory:
    """Devices that hold the same.

    Attributes:
        devices: Their numbers.
        roles: What lives there.
        phases: Of each role in turn.
        lacking: What cannot work there whatever else is moved, as sentences.
    """

    devices: tuple[int, ...]
    roles: tuple[str, ...]
    phases: tuple[PhaseMemory, ...]
    lacking: tuple[str, ...] = ()

    @property
    def fullest(self) -> PhaseMemory:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.bytes)


@dataclass(frozen=True)
class Plan:
    """What a job will do and take.

    Attributes:
        placement: Which role lives where.
        machines: On what.
        sizes: Of a step.
        batches: Micro-batches of each role and phase.
        parameters: Of each role's model.
        memory: Of the devices, those alike together.
        sync_bytes: That a device receives at a weight sync, at most.
        times: Of a step, where rates are known.
    """

    placement: Placement
    machines: Machines
    sizes: Sizes
    batches: Mapping[tuple[str, str], MicroBatches]
    parameters: Mapping[str, int]
    memory: Sequence[DeviceMemory]
    sync_bytes: float
    times: Times | None = None

    @property
    def fullest(self) -> float:
        """Bytes of the fullest device at its fullest moment."""
        return max(device.fullest.bytes for device in self.memory)

    def fits(self, tolerance: float = 1.0) -> bool:
        """Whether every device has room for `1 / tolerance` of what is expected."""
        return not self.lacking and self.fullest <= tolerance * self.machines.memory

    @property
    def lacking(self) -> list[str]:
        """Sentences for what cannot work at all."""
        return [sentence for device in self.memory for sentence in device.lacking]


def make_plan(
    config: Config,
    machines: Machines,
    placement: Placement | None = None,
    lengths: tuple[float, float] | None = None,
    rates: Rates | None = None,
) -> Plan:
    """The plan of a job whose model paths are folders.

    Args:
        placement: None: as the settings say.
        lengths: Tokens of a prompt and of a response; None: the longest that are allowed.
        rates: Of the machines; None: without an estimate of time.

    Raises:
        ConfigError: if there is no such placement.
    """
    placement = placement or check_placement(config, machines.cluster)
    planner = Planner(config, machines, placement, sizes_of(config, lengths))
    plan = planner.plan()
    return plan if rates is None else replace(plan, times=estimate(planner, rates))


class Planner:
    """Works a plan out; what it knows of roles, others may ask."""

    def __init__(
        self, config: Config, machines: Machines, placement: Placement, sizes: Sizes
    ) -> None:
        self.config, self.machines, self.placement, self.sizes = config, machines, placement, sizes
        self.calls = calls_of(config, sizes, placement)
        self.kind = machines.cluster.kind
        self.batches = {
            (call.role, call.phase): self.batch(call)
            for call in self.calls
            if call.phase in ("score", "train") and has_model(config, call.role)
        }

    def plan(self) -> Plan:
        alike: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        for device in range(len(self.machines.cluster.devices)):
            here = tuple(
                (role, self.stages(role)[place.devices.index(device)])
                for role, place in self.placement.roles.items()
                if device in place.devices
            )
            alike[here].append(device)
        return Plan(
            placement=self.placement,
            machines=self.machines,
            sizes=self.sizes,
            batches=self.batches,
            parameters={
                role: self.shape(role, whole=True).parameters.all
                for role in self.placement.roles
                if has_model(self.config, role)
            },
            memory=[self.device(here, devices) for here, devices in alike.items() if here],
            sync_bytes=self.sync_bytes(),
        )

    def device(self, here: tuple[tuple[str, int], ...], devices: list[int]) -> DeviceMemory:
        """What these roles, each a stage of its pipeline, take of a device together."""
        lacking: list[str] = []
        stays: dict[str, Parts] = {"": {"process": self.process(here)}}
        for role, stage in here:
            stays[role] = self.resident(role, stage)
        stages = dict(here)
        phases: dict[tuple[str, str], PhaseMemory] = {}
        left: dict[str, Parts] = {}
        for call in [*self.calls, *self.calls]:  # a second step finds what the first one left
            role, phase = call.role, call.phase
            if role not in stages:
                continue
            if phase in ("sync", "train"):
                left.pop(role, None)  # reading the shards, or a backward, frees what was gathered
            added, lacks = self.working(role, stages[role], phase)
            parked = self.kind == "cuda" and self.config.actor.offload_between_calls
            others = [] if parked else [parts for name, parts in left.items() if name != role]
            here_now = ("", role) if parked else stays
            parts = _sum([*(stays[name] for name in here_now), *others, added])
            phases[role, phase] = PhaseMemory(role, phase, parts)
            lacking += lacks
            if phase == "score" and has_model(self.config, role):
                left[role] = self.part(role, stages[role]).left_gathered()
        idle = PhaseMemory(here[0][0], "idle", _sum(stays.values()))
        found = tuple(phases.values()) or (idle,)  # idle: roles that are never called
        return DeviceMemory(tuple(devices), tuple(stages), found, tuple(dict.fromkeys(lacking)))

    def process(self, here: tuple[tuple[str, int], ...]) -> float:
        uses_vllm = self.config.rollout.engine == "vllm" and any(
            self.generates(role) for role, _ in here
        )
        return PROCESS[self.kind] + (VLLM_PROCESS[self.kind] if uses_vllm else 0)

    def resident(self, role: str, stage: int) -> Parts:
        """What a role has on a device between calls."""
        found: Parts = {}
        if role != GENERATOR and has_model(self.config, role):
            found = self.part(role, stage).resident()
        if self.generates(role) and not self.sleeps:
            found["generation copy"] = memory.generation_copy(self.generation_shape())
            if self.config.rollout.engine == "vllm":
                found["kv_cache"] = self.config.rollout.kv_cache_gib * GIB
        return found | self.judge(role)

    def working(self, role: str, stage: int, phase: str) -> tuple[Parts, list[str]]:
        """What a phase adds, and sentences for what cannot be done in it."""
        if phase in ("sync", "generate"):
            return self.generating(role, phase)
        if not has_model(self.config, role):
            return {}, []
        part, batch = self.part(role, stage), self.batches[role, phase]
        work = part.training if phase == "train" else part.scoring
        return work(batch, self.sizes), []

    def generating(self, role: str, phase: str) -> tuple[Parts, list[str]]:
        rollout, shape = self.config.rollout, self.generation_shape()
        weights = memory.generation_copy(shape)
        if rollout.engine == "transformers":
            rows = -(-self.sizes.samples // len(self.placement.roles[role].devices))
            if phase == "sync":
                return {}, []
            return memory.generating_with_transformers(self.config, shape, self.sizes, rows), []
        if not self.sleeps:
            return {}, []
        if phase == "sync":
            return {"generation copy": weights}, []
        share = rollout.memory_share * self.machines.memory
        least = weights + memory.cache_bytes(shape, self.sizes.sample_tokens) + ENGINE_ROOM
        lacking = []
        if share < least:
            lacking.append(
                f"rollout.memory_share={rollout.memory_share} of a device is "
                f"{share / GIB:.1f} GiB, but the generator's weights with the cache of one sample "
                f"take {least / GIB:.1f}"
            )
        return {"generation copy": weights, "kv_cache": max(0.0, share - weights)}, lacking

    def judge(self, role: str) -> Parts:
        settings = getattr(self.config, role, None) if role in ("reward", "cost") else None
        if settings is None or not settings.judge.path:
            return {}
        if self.kind == "cuda" and self.config.rollout.engine == "vllm":
            return {"judge": self.config.rollout.memory_share * self.machines.memory}
        shape = self._shape(settings.judge.path, 1, False)
        return {
            "judge": memory.generation_copy(shape) + self.config.rollout.kv_cache_gib * GIB,
        }

    @property
    def sleeps(self) -> bool:
        """Whether the generator gives its memory back while others work."""
        return self.kind == "cuda" and self.config.rollout.engine == "vllm"

    def generates(self, role: str) -> bool:
        named = GENERATOR if self.placement.is_separated else "actor"
        return role == named and any(call.phase == "generate" for call in self.calls)

    def batch(self, call: Call) -> MicroBatches:
        place = self.placement.roles[call.role]
        return micro_batches(self.config, self.sizes, call, len(place.devices), place.parallel)

    @cache  # noqa: B019 (a planner lives for one plan)
    def stages(self, role: str) -> list[int]:
        """The pipeline stage of each of a role's devices, in rank order."""
        place = self.placement.roles[role]
        if place.parallel.pp == 1:
            return [0] * len(place.devices)
        share = self.rollout_tp if self.generates(role) else 1
        mesh = training_mesh(len(place.devices), place.parallel, share)
        return [mesh.coordinates(rank)["pp"].index for rank in range(len(place.devices))]

    @cache  # noqa: B019
    def part(self, role: str, stage: int) -> ModelPart:
        place = self.placement.roles[role]
        return memory.model_part(
            self.shape(role),
            self.config,
            place.parallel,
            devices=len(place.devices),
            stage=stage,
            trains=role in LEARNERS,
            is_cuda=self.kind == "cuda",
        )

    @property
    def rollout_tp(self) -> int:
        """Devices that share a copy while generating."""
        if self.placement.is_separated:
            return self.placement.roles[GENERATOR].parallel.tp
        return self.config.rollout.parallel.tp

    def generation_shape(self) -> ModelShape:
        """Of one rank's part of the generation copy."""
        return self._shape(self.config.model.path, self.rollout_tp, False)

    def shape(self, role: str, whole: bool = False) -> ModelShape:
        """Of one rank's part of a role's model, or of all of it."""
        config, tp = self.config, self.placement.roles[role].parallel.tp
        paths = {
            "critic": config.critic.path,
            "cost_critic": config.critic.path,
            "reward": config.reward.model,
            "cost": config.cost.model if config.cost else None,
        }
        scalar = role in paths or role == "reward_model"
        trained = config.actor.lora if role in LEARNERS else None
        return self._shape(
            paths.get(role) or config.model.path, 1 if whole else tp, scalar, trained
        )

    def _shape(
        self, path: str, tp: int, scalar: bool, lora: LoraSettings | None = None
    ) -> ModelShape:
        checkpointing = self.config.actor.gradient_checkpointing
        dtype = self.config.model.dtype
        return shape_of(
            _model_config(path),
            dtype,
            tp=tp,
            scalar=scalar,
            checkpointing=checkpointing,
            lora=lora if lora and lora.rank else None,
        )

    def sync_bytes(self) -> float:
        """What the busiest device receives: what its part of the generation copy lacks of its part
        of the training weights."""
        if not any(call.phase == "sync" for call in self.calls):
            return 0.0
        copy = memory.generation_copy(self.generation_shape())
        if self.placement.is_separated:
            return copy
        place: Any = self.placement.roles["actor"]
        parallel: ParallelConfig = place.parallel
        data = len(place.devices) // (parallel.tp * parallel.pp)
        parts = parallel.tp * parallel.pp * (parallel.shards or data)
        if len(place.devices) == 1:
            return 0.0
        if self.config.actor.lora.rank:  # whole tensors, adapters multiplied in
            return self.shape("actor", whole=True).parameters.all * 4.0 * (1 - 1 / parts)
        held = self.generation_shape().item * self.shape("actor", whole=True).parameters.all / parts
        return max(0.0, copy - held)


@cache
def _model_config(path: str) -> PretrainedConfig:
    return load_config(path)


def _sum(several: Any) -> Parts:
    found: defaultdict[str, float] = defaultdict(float)
    for parts in several:
        for name, size in parts.items():
            found[name] += size
    return dict(found)


def to_json(plan: Plan) -> str:
    """The plan as text; `placement=file placement.path=<it>` runs it, after a person's edits."""
    placed = json.loads(plan.placement.to_json())
    found = {
        **placed,
        "devices": {
            "number": len(plan.machines.cluster.devices),
            "name": plan.machines.name,
            "memory_bytes": plan.machines.memory,
        },
        "sizes": {**asdict(plan.sizes), "tokens": plan.sizes.tokens},
        "micro_batches": {
            f"{role}/{phase}": asdict(batch) for (role, phase), batch in plan.batches.items()
        },
        "parameters": dict(plan.parameters),
        "memory": [
            {
                "devices": list(device.devices),
                "phases": {
                    f"{phase.role}/{phase.phase}": {"bytes": phase.bytes, **phase.parts}
                    for phase in device.phases
                },
            }
            for device in plan.memory
        ],
        "sync_bytes": plan.sync_bytes,
        "fits": plan.fits(),
    }
    if plan.times is not None:
        calls = [
            {"role": call.role, "phase": call.phase, "seconds": seconds}
            for call, seconds in plan.times.calls
        ]
        found["time"] = {"step": plan.times.step, "source": plan.times.source, "calls": calls}
    return json.dumps(found, indent=2)
