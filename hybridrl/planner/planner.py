"""What a plan has to know of each role: what it is called for, the shape of its model and of each
device's part of it, and how it packs its samples."""

from __future__ import annotations

from functools import cache

from transformers import PretrainedConfig

from hybridrl.config.placement_checks import LEARNERS
from hybridrl.config.schema import Config
from hybridrl.core.training_mesh import training_mesh
from hybridrl.models import load_config
from hybridrl.placement import GENERATOR, Placement
from hybridrl.planner.dataflow import Sizes, calls_of, has_model, micro_batches
from hybridrl.planner.devices import Machines
from hybridrl.planner.memory import ModelPart, generation_copy
from hybridrl.planner.model_shape import ModelShape, shape_of


class Planner:
    """The roles of one job.

    Attributes:
        calls: Of a step, in order.
        batches: Micro-batches of each role and phase that runs a model.
        generator: The role that generates; None if nothing is generated.
        sleeps: Whether it gives its memory back while others work.
    """

    def __init__(
        self, config: Config, machines: Machines, placement: Placement, sizes: Sizes
    ) -> None:
        self.config, self.machines, self.placement, self.sizes = config, machines, placement, sizes
        self.calls = calls_of(config, sizes, placement)
        self.batches = {
            (call.role, call.phase): micro_batches(config, sizes, call, placement.roles[call.role])
            for call in self.calls
            if call.phase in ("score", "train") and has_model(config, call.role)
        }
        self.generator = next((c.role for c in self.calls if c.phase == "generate"), None)
        self.sleeps = machines.is_cuda and config.rollout.engine == "vllm"

    @property
    def rollout_tp(self) -> int:
        """Devices that share a copy while generating."""
        if self.placement.is_separated:
            return self.placement.roles[GENERATOR].parallel.tp
        return self.config.rollout.parallel.tp

    @cache  # noqa: B019 (a planner lives for one plan)
    def stages(self, role: str) -> list[int]:
        """The pipeline stage of each of a role's devices, in rank order."""
        place = self.placement.roles[role]
        if place.parallel.pp == 1:
            return [0] * len(place.devices)
        share = self.rollout_tp if role == self.generator else 1
        mesh = training_mesh(len(place.devices), place.parallel, share)
        return [mesh.coordinates(rank)["pp"].index for rank in range(len(place.devices))]

    @cache  # noqa: B019
    def part(self, role: str, stage: int) -> ModelPart:
        """What one device of a pipeline stage holds of a role's model."""
        place, actor, shape = self.placement.roles[role], self.config.actor, self.shape(role)
        parallel, is_cuda = place.parallel, self.machines.is_cuda
        base, more = divmod(shape.layers, parallel.pp * parallel.chunks)
        chunks = range(stage, parallel.pp * parallel.chunks, parallel.pp)
        offload = actor.offload_parameters and is_cuda
        return ModelPart(
            shape,
            layers=sum(base + (chunk < more) for chunk in chunks),
            ends=(stage == 0, stage == parallel.pp - 1),
            shards=parallel.shards or len(place.devices) // (parallel.tp * parallel.pp),
            micro_batches_held=parallel.pp - stage,
            trains=role in LEARNERS,
            offload_parameters=offload,
            offload_optimizer=actor.offload_optimizer and is_cuda and not offload,
        )

    def generation_shape(self) -> ModelShape:
        """Of one rank's part of the generation copy."""
        return shape_at(self.config.model.path, self.config, tp=self.rollout_tp)

    def shape(self, role: str, whole: bool = False) -> ModelShape:
        """Of one rank's part of a role's model, or of all of it."""
        config = self.config
        paths = {
            "critic": config.critic.path,
            "cost_critic": config.critic.path,
            "reward": config.reward.model,
            "cost": config.cost.model if config.cost else None,
            "reward_model": None,
        }
        return shape_at(
            paths.get(role) or config.model.path,
            config,
            tp=1 if whole else self.placement.roles[role].parallel.tp,
            scalar=role in paths,
            trains=role in LEARNERS,
        )

    def sync_bytes(self) -> float:
        """What the busiest device receives: what its part of the generation copy lacks of its part
        of the training weights."""
        if all(call.phase != "sync" for call in self.calls):
            return 0.0
        shape = self.generation_shape()
        if self.placement.is_separated:
            return generation_copy(shape)
        place = self.placement.roles["actor"]
        if len(place.devices) == 1:
            return 0.0
        cut = place.parallel.tp * place.parallel.pp
        parts = cut * (place.parallel.shards or len(place.devices) // cut)
        whole = self.shape("actor", whole=True).parameters.all
        if self.config.actor.lora.rank:  # whole tensors, adapters multiplied in
            return whole * 4.0 * (1 - 1 / parts)
        return max(0.0, generation_copy(shape) - shape.item * whole / parts)


def shape_at(
    path: str, config: Config, *, tp: int = 1, scalar: bool = False, trains: bool = False
) -> ModelShape:
    """One of `tp` ranks' part of the model in a folder, as a job computes with it."""
    return shape_of(
        _model_config(path),
        config.model.dtype,
        tp=tp,
        scalar=scalar,
        checkpointing=config.actor.gradient_checkpointing,
        lora=config.actor.lora if trains else None,
    )


@cache
def _model_config(path: str) -> PretrainedConfig:
    return load_config(path)
