"""The roles of a planned job: the calls that each takes, the shape of its model and of the part on
each device, and how it packs its samples."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

from transformers import PretrainedConfig

from hybridrl.config.role_models import parse_role_model
from hybridrl.config.schema import Config, OptimizerConfig
from hybridrl.layout.training_mesh import build_training_mesh, model_parallel_size
from hybridrl.models.activation_checkpointing import NO_CHECKPOINTING
from hybridrl.models.language_model import build_meta_language_model
from hybridrl.models.model_loading import load_model_config
from hybridrl.models.model_shape import ModelShape, compute_model_shape
from hybridrl.models.packed_models import PackedModel
from hybridrl.models.packing_trial import resolve_sample_layout
from hybridrl.models.prompt_sharing_gain import LeastSaving, find_least_saving
from hybridrl.models.token_bytes import META_ATTENTION
from hybridrl.placement import ACTOR_ROLE, GENERATOR_ROLE, Placement, RolePlace
from hybridrl.placement.disaggregated_actor import choose_weight_transport
from hybridrl.planner.machine.device_catalog import GIB
from hybridrl.planner.memory.generation_memory import generation_copy_bytes
from hybridrl.planner.memory.model_part import FLOAT32_BYTES, ModelPart
from hybridrl.planner.memory.optimizer_memory import count_gathered_bytes, count_state_bytes
from hybridrl.planner.step.call_recorder import record_calls
from hybridrl.planner.step.step_calls import StepSizes, plan_micro_batches
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.system.device_traits import is_compile_worthwhile
from hybridrl.system.dtypes import DTYPES
from hybridrl.trainers.role_spec import RoleSpec

VLLM_BYTES = 2.5 * GIB
"""What vLLM takes of its share on a GPU beside weights and cache: activations, captured graphs,
workspaces."""


class JobRoles:
    """The roles of one job, with their calls, models and micro-batches.

    Attributes:
        calls: Of a step, in order.
        batches: Micro-batches of each role and phase that runs a model.
        notice: A sentence if the calls had to be guessed; else empty.
        generators: The roles that generate.
        sleeps: Whether these give their memory back while others work.
        memory_share: `rollout.memory_share`; None while it is not chosen.
        stages: `(role)`: the pipeline stage of each of its devices, in rank order.
        part: `(role, stage)`: the part of its model that one device of a pipeline stage holds.
    """

    def __init__(
        self,
        config: Config,
        cluster: ClusterSpec,
        placement: Placement,
        sizes: StepSizes,
        roles: Mapping[str, RoleSpec],
    ) -> None:
        self.config, self.cluster, self.placement, self.sizes = config, cluster, placement, sizes
        self.roles = roles
        self.calls, self.notice = record_calls(config, sizes, placement, roles)
        self.generators = {call.role for call in self.calls if call.phase == "generate"}
        self.sleeps = cluster.is_cuda and config.rollout.engine == "vllm"
        self.memory_share = config.rollout.memory_share
        self._begin()

    def _begin(self) -> None:
        self.batches = {
            (call.role, call.phase): plan_micro_batches(
                *(self.config, self.sizes, call, self.placement.roles[call.role]),
                self._least_saving(call.role),
            )
            for call in self.calls
            if call.phase in ("score", "train") and self.has_model(call.role)
        }
        self.stages, self.part = cache(self._stages_of), cache(self._part_of)

    def of_role(self, role: str, place: RolePlace, config: Config) -> JobRoles:
        """Return a copy with one role alone, on this place.

        Args:
            config: Settings that do not change the calls of a step.
        """
        alone = copy(self)
        alone.config, alone.placement = config, Placement(self.placement.strategy, {role: place})
        alone.calls = [call for call in self.calls if call.role == role]
        alone.generators, alone.memory_share = self.generators & {role}, config.rollout.memory_share
        alone._begin()
        return alone

    def _least_saving(self, role: str) -> LeastSaving | None:
        """Return what sharing prompts has to spare in a role's model; see `find_least_saving`."""
        if self.config.rollout.routing_replay or self.sizes.samples == self.sizes.prompts:
            return None
        self.shape(role, whole=True)  # a NotPlannedError for a model that cannot be built
        setting, scalar = self.config.actor.share_prefixes, bool(self.roles[role].scalar)
        return load_least_saving(setting, self.path(role), scalar)

    def has_model(self, role: str) -> bool:
        """Return whether a role holds a model that is cut over its devices."""
        return role == GENERATOR_ROLE or self.roles[role].has_model(role, self.config)

    def rollout_tp(self, role: str) -> int:
        """Return the number of a role's devices that share one copy of the model while
        generating."""
        if role == GENERATOR_ROLE:
            return model_parallel_size(self.placement.roles[GENERATOR_ROLE].parallel)
        return self.config.rollout.parallel.ranks

    def _stages_of(self, role: str) -> list[int]:
        place = self.placement.roles[role]
        if place.parallel.pp == 1:
            return [0] * len(place.devices)
        share = self.rollout_tp(role) if role in self.generators else 1
        mesh = build_training_mesh(len(place.devices), place.parallel, share)
        return [mesh.coordinates(rank)["pp"].index for rank in range(len(place.devices))]

    def _part_of(self, role: str, stage: int) -> ModelPart:
        place, actor, shape = self.placement.roles[role], self.config.actor, self.shape(role)
        parallel, is_cuda = place.parallel, self.cluster.is_cuda
        optimizer = self.optimizer(role)
        base, more = divmod(shape.layers, parallel.pp * parallel.chunks)
        chunks = range(stage, parallel.pp * parallel.chunks, parallel.pp)
        offload = actor.offload_parameters and is_cuda
        shards = parallel.shards or len(place.devices) // (parallel.tp * parallel.pp)
        part = ModelPart(
            shape,
            layers=sum(base + (chunk < more) for chunk in chunks),
            ends=(stage == 0, stage == parallel.pp - 1),
            shards=shards,
            micro_batches_held=parallel.pp - stage,
            trains=self.trains(role),
            device=self.cluster.kind,
            offload_parameters=offload,
            offload_optimizer=actor.offload_optimizer and is_cuda and not offload,
            restores=optimizer.moments != "float32",
            summed=DTYPES.get(parallel.gradients, DTYPES["float32"]).itemsize,
            by_difference=shards > 1 and self.trains(role) and parallel.weights != "full",
            checkpointing=actor.gradient_checkpointing,
        )
        if part.trains and (trained := part.parameters.trained):
            state = count_state_bytes(optimizer, part, self.shape(role, whole=True))
            gathered = count_gathered_bytes(optimizer, part)
            part = replace(part, moment=state / (2 * trained), gathered_by_step=gathered)
        # On CPUs vLLM, which generates there, switches the compiler off.
        compiles = is_compile_worthwhile(self.cluster.kind) and not part.shape.quantized
        wanted = actor.compile if compiles else "false"
        return replace(part, compiled=wanted == "true" or (wanted == "auto" and not part.is_small))

    def optimizer(self, role: str) -> OptimizerConfig:
        """Return the optimizer settings of a role's model."""
        return parse_role_model(self.config, role).optimizer_of(self.config.actor.optimizer)

    def trains(self, role: str) -> bool:
        return role != GENERATOR_ROLE and bool(self.roles[role].trains)

    def path(self, role: str) -> str:
        """Return the path that a role's model is read from."""
        own = None if role == GENERATOR_ROLE else self.roles[role].path(role, self.config)
        return str(own or self.config.model.path)

    def generation_shape(self, role: str) -> ModelShape:
        """Return the shape of one rank's part of a role's generation copy; with `rollout=pipeline`,
        of a stage with an equal share of the layers and both ends."""
        parallel: Any = self.config.rollout.parallel
        if role == GENERATOR_ROLE:
            parallel = self.placement.roles[GENERATOR_ROLE].parallel
        shape = load_model_shape(self.path(role), self.config, tp=parallel.tp)
        return replace(shape, layers=-(-shape.layers // parallel.pp))

    def shape(self, role: str, whole: bool = False) -> ModelShape:
        """Return the shape of one rank's part of a role's model, or of the whole model."""
        cut = self.placement.roles[role].parallel
        return load_model_shape(
            self.path(role),
            self.config,
            tp=1 if whole else cut.tp,
            scalar=role != GENERATOR_ROLE and bool(self.roles[role].scalar),
            trains=self.trains(role),
            splits_tokens=not whole and cut.tp > 1 and cut.pp * cut.ring * cut.ulysses == 1,
        )

    def cache_bytes(self, role: str, memory: float) -> float:
        """Return the bytes of vLLM's KV cache on a device.

        Args:
            memory: Bytes that the device has.
        """
        rollout = self.config.rollout
        if not self.sleeps:
            return rollout.kv_cache_gib * GIB
        weights = generation_copy_bytes(self.generation_shape(role), rollout.quantization)
        return max(0.0, (self.memory_share or 0.0) * memory - weights - VLLM_BYTES)

    def checkpoint_bytes(self, role: str) -> float:
        """Return the host memory that a device's share of a role's checkpoints takes during
        training: the copy that is written, and twice the memory copies, because an old one stays
        until the new one is complete."""
        settings = self.config.checkpoint
        if not (settings.wanted and settings.asynchronous):
            return 0.0
        if not (self.has_model(role) and self.trains(role)):
            return 0.0
        whole, part = self.shape(role, whole=True), replace(self.part(role, 0), shards=1)
        kept = replace(self.optimizer(role), moments="float32")  # as files have them
        state = count_state_bytes(kept, part, whole) / max(1, part.parameters.trained)
        stored = (FLOAT32_BYTES + state) * whole.parameters.trained
        share = stored / len(self.placement.roles[role].devices)
        return share * (1 + 2 * self.nodes_of_a_copy)

    @property
    def nodes_of_a_copy(self) -> int:
        """Return the number of nodes that hold a checkpoint in memory; 0 if none does."""
        others = self.config.checkpoint.memory_copies
        return min(others + 1, len(self.cluster.nodes)) if others else 0

    def sync_bytes(self, role: str) -> float:
        """Return the bytes that the busiest device of a generating role receives: what its part of
        the generation copy lacks of its training weights."""
        shape = self.generation_shape(role)
        if role == GENERATOR_ROLE:
            return generation_copy_bytes(shape)
        place = self.placement.roles[role]
        if len(place.devices) == 1:
            return 0.0
        cut = place.parallel.tp * place.parallel.pp
        parts = cut * (place.parallel.shards or len(place.devices) // cut)
        model = self.shape(role, whole=True)
        whole = model.parameters.all
        if self.config.actor.lora.rank:  # whole tensors: adapters, or weights with them inside
            separate = self.config.rollout.adapters == "separate"
            return (model.parameters.trained if separate else whole) * 4.0 * (1 - 1 / parts)
        # Of its own shards it uses all where generation cuts as training does. Where that cuts
        # finer, it uses rows only if as many ranks share them, and of other matrices its columns.
        finer = max(1, self.rollout_tp(role) // place.parallel.tp)
        crosswise = model.crosswise * model.layers
        used = crosswise / finer + (whole - crosswise if finer in (1, parts // cut) else 0)
        return max(0.0, generation_copy_bytes(shape) - shape.item * used / parts)

    def record_bytes(self, role: str) -> float:
        """Return the host memory of a device's record of the generator's weights, for senders and
        receivers of differences."""
        places = self.placement.roles
        if role not in (ACTOR_ROLE, GENERATOR_ROLE) or self.config.actor.lora.rank:
            return 0.0
        if not {ACTOR_ROLE, GENERATOR_ROLE} <= places.keys():
            return 0.0
        ends = [*places[ACTOR_ROLE].devices, *places[GENERATOR_ROLE].devices]
        devices = self.cluster.devices
        if choose_weight_transport(self.config, (devices[number] for number in ends))[1] == "full":
            return 0.0
        if role == GENERATOR_ROLE:
            return generation_copy_bytes(self.generation_shape(role))
        whole = self.shape(role, whole=True)
        return whole.item * whole.parameters.all / len(places[role].devices)


_SHAPES: dict[tuple[object, ...], ModelShape] = {}
"""What was counted before, by what it depends on."""


def load_model_shape(
    path: str,
    config: Config,
    *,
    tp: int = 1,
    scalar: bool = False,
    trains: bool = False,
    splits_tokens: bool = False,
) -> ModelShape:
    """Load the shape of one of `tp` ranks' part of the model in a folder, as a job computes with
    it; cached."""
    lora, checkpointing = config.actor.lora, config.actor.gradient_checkpointing
    if checkpointing == "auto":  # to begin with
        checkpointing = NO_CHECKPOINTING
    adapters = repr(lora) if trains and lora.rank else ""
    of_any: tuple[object, ...] = (path, config.model.dtype, tp, scalar, adapters, splits_tokens)
    key = (*of_any, checkpointing) if trains else of_any  # who only scores keeps nothing
    if key not in _SHAPES:
        found = compute_model_shape(
            read_model_config(path),
            config.model.dtype,
            tp=tp,
            scalar=scalar,
            checkpointing=checkpointing,
            lora=lora if trains else None,
            splits_tokens=splits_tokens,
        )
        _SHAPES[key] = found
        _SHAPES.setdefault(of_any, found)
        _SHAPES.setdefault((*of_any, checkpointing), found)
    return _SHAPES[key]


@cache
def load_least_saving(setting: str, path: str, scalar: bool) -> LeastSaving | None:
    """Return what sharing prompts has to spare in the model in a folder; cached."""
    if setting == "false":
        return None
    config = read_model_config(path)
    rows = resolve_sample_layout(config, path, scalar=scalar)
    model = build_meta_language_model(config, scalar=scalar, attn_implementation=META_ATTENTION)
    return find_least_saving(setting, PackedModel(model, rows))


@cache
def read_model_config(path: str) -> PretrainedConfig:
    """Load the configuration of the model in a folder; cached."""
    return load_model_config(path)
