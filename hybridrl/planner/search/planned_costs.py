"""The costs that a search compares: the cuts of each role's model over some devices, and the memory
and time that each takes of them. From the planner, one role at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from hybridrl.checks.machine.placement_checks import (
    check_model_cut,
    list_placed_roles,
    resolve_roles,
)
from hybridrl.config.changed import apply_changes
from hybridrl.config.schema import Config, ParallelConfig
from hybridrl.errors import ConfigError
from hybridrl.layout.training_mesh import check_parallel_sizes, model_parallel_size
from hybridrl.placement import ACTOR_ROLE, GENERATOR_ROLE, Placement, RolePlace
from hybridrl.planner.computation_dtype import resolve_dtype
from hybridrl.planner.fitting_settings import LARGEST_TP, search_variants
from hybridrl.planner.job_roles import JobRoles, read_model_config
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.memory.device_memory import (
    FREE_SHARE,
    MEMORY_SHARES,
    estimate_process_bytes,
    estimate_role_memory,
    find_generator_shortage,
)
from hybridrl.planner.memory.model_part import MemoryParts
from hybridrl.planner.search.memory_states import prune_options
from hybridrl.planner.search.placement_space import MAX_PP, powers_of_two
from hybridrl.planner.search.search_terms import (
    CutOption,
    FoundPlacement,
    RoleBytes,
    SettingChanges,
)
from hybridrl.planner.step.call_time import CallTimeEstimator
from hybridrl.planner.step.step_calls import PlannedCall, SampleLengths, compute_step_sizes
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.trainers.role_spec import RoleSpec


class ModelCut(NamedTuple):
    """A way to cut a role's model over devices.

    Attributes:
        rollout_tp: While it generates where it trains; 0: it does not.
        memory_share: As `rollout.memory_share`, while it generates.
    """

    parallel: ParallelConfig
    rollout_tp: int = 0
    memory_share: float | None = None


class PlannedSearchCosts:
    """The costs of a job for a search, by its plan.

    Attributes:
        roles, learning: Roles that hold models, and those of them that learn.
        separable: See `list_shapes`.
        devices: How many there are.
        differ: Whether devices differ, so that it matters which ones a role gets.
        variants: Settings of a whole job that may make it fit. With the first, what was asked, no
            call of any cut takes longer than with another.
        staleness: What a separated generator may have, in steps.

    Args:
        config: With folders for models.
        cluster: With memory of its devices.
        rates: Of each device.
        lengths: Of its samples; None: the longest that are allowed.
        roles: Of the job; None: those of its trainer.
    """

    def __init__(
        self,
        config: Config,
        cluster: ClusterSpec,
        rates: Sequence[DeviceRates],
        lengths: SampleLengths | None = None,
        roles: Mapping[str, RoleSpec] | None = None,
    ) -> None:
        self.config = config = resolve_dtype(config, cluster.kind)
        self.cluster, self.rates, self.lengths = cluster, rates, lengths
        self.specs = resolve_roles(config, roles)
        self.placed = {role.name: role for role in list_placed_roles(config, self.specs)}
        self.devices = len(cluster.devices)
        self.differ = len(set(map(id, self.rates))) > 1 or len(cluster.model_names) > 1
        self.staleness = config.placement.staleness
        self._configs = {
            variant: apply_changes(config, list(variant))
            for variant in search_variants(config, cluster)
        }
        self.variants: list[SettingChanges] = list(self._configs)
        self._planners: dict[bool, JobRoles] = {}
        generates = [name for name, role in self.placed.items() if role.generation is not None]
        has_several = self.devices > 1 and config.executor != "inline"
        self.separable = ACTOR_ROLE in generates and has_several
        # Functions and judges take nothing of a device here, and live with what makes samples.
        self.roles = [n for n in self.placed if n in generates or self._has_model(n)]
        self.beside = [name for name in self.placed if name not in self.roles]
        self.learning = [name for name in self.roles if self.placed[name].trains]
        self._options: dict[Any, list[CutOption]] = {}

    def calls(self, apart: bool) -> Sequence[PlannedCall]:
        """List the calls of a step, in order.

        Args:
            apart: Here and below, whether generation has devices of its own.
        """
        return [call for call in self._planner(apart).calls if call.role not in self.beside]

    def process(self, apart: bool, roles: Sequence[str]) -> float:
        """Return the bytes of a process with these roles."""
        return estimate_process_bytes(self._planner(apart), roles)

    def offloads(self, variant: SettingChanges) -> bool:
        """Return whether roles leave a device while another one works there."""
        return self.cluster.is_cuda and self._configs[variant].actor.offload_between_calls

    def capacities(self, devices: range) -> Mapping[str, float]:
        """Return the bytes of these devices that may be filled, by device model."""
        models = self.cluster.models
        names = self.cluster.take(devices).model_names
        return {name: (1 - FREE_SHARE) * models[name].memory for name in names}

    def options(
        self, variant: SettingChanges, apart: bool, role: str, devices: range
    ) -> list[CutOption]:
        """List the ways to cut a role's model over these devices than which no other is better."""
        apart = apart and role in (ACTOR_ROLE, GENERATOR_ROLE)  # others do not mind
        key = variant, apart, role, self._alike(devices)
        if key not in self._options:
            self._options[key] = prune_options(self._options_of(*key[:3], devices))
        return self._options[key]

    def placement(self, found: FoundPlacement) -> Placement:
        """Build the placement of all roles."""
        places = {}
        homes = GENERATOR_ROLE, ACTOR_ROLE, *found.where
        home = next(role for role in homes if role in found.where)
        for name in [*self.placed, GENERATOR_ROLE]:
            if name in found.where:
                places[name] = RolePlace(tuple(found.where[name]), found.cuts[name].parallel)
            elif name in self.beside:
                places[name] = RolePlace(tuple(found.where[home]), self.placed[name].parallel)
        return Placement("auto", places)

    def settings(self, found: FoundPlacement) -> SettingChanges:
        """List the settings, beside the placement, that differ from the configuration."""
        rollout = self.config.rollout
        changes = list(found.variant)
        tp = max((cut.rollout_tp for cut in found.cuts.values()), default=0)
        if GENERATOR_ROLE in found.cuts:
            tp = found.cuts[GENERATOR_ROLE].parallel.tp
        if tp and tp != rollout.parallel.tp:
            changes.append(("rollout.parallel.tp", tp))
        if self.staleness and GENERATOR_ROLE not in found.where:
            changes.append(("placement.staleness", 0))
        if self.config.placement.in_flight and GENERATOR_ROLE not in found.where:
            changes.append(("placement.in_flight", False))
        return tuple(changes)

    def _has_model(self, name: str) -> bool:
        return name == GENERATOR_ROLE or bool(self.specs[name].has_model(name, self.config))

    def _planner(self, apart: bool) -> JobRoles:
        if apart not in self._planners:
            everywhere = tuple(range(self.devices))
            places = {name: RolePlace(everywhere) for name in self.placed}
            if apart:
                places[GENERATOR_ROLE] = RolePlace(everywhere)
            sizes = compute_step_sizes(self.config, self.lengths)
            placement = Placement("auto", places)
            self._planners[apart] = JobRoles(
                self.config, self.cluster, placement, sizes, self.specs
            )
        return self._planners[apart]

    def _alike(self, devices: range) -> tuple[Any, ...]:
        """Return a key that is equal for devices of the same models and rates that lie alike in
        nodes."""
        runs: list[tuple[Any, ...]] = []
        node = None
        for number in devices:
            device = self.cluster.devices[number]
            if device.node != node:
                runs.append((device.model, id(self.rates[number]), 0))
                node = device.node
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        return tuple(runs)

    def _options_of(
        self, variant: SettingChanges, apart: bool, role: str, devices: range
    ) -> list[CutOption]:
        base = self._planner(apart)
        rates = DeviceRates.of_slowest(self.rates[device] for device in devices)
        found: list[CutOption] = []
        for cut in self._cuts(role, apart, [run[-1] for run in self._alike(devices)]):
            config = self._configs[variant]
            if cut.rollout_tp and cut.rollout_tp != config.rollout.parallel.tp:
                parallel = replace(config.rollout.parallel, tp=cut.rollout_tp)
                config = replace(config, rollout=replace(config.rollout, parallel=parallel))
            alone = base.of_role(role, RolePlace(tuple(devices), cut.parallel), config)
            clock = CallTimeEstimator(alone, rates)
            known = [0.0 if c.phase == "generate" else clock.seconds(c) for c in alone.calls]
            shares: Sequence[float | None] = [alone.memory_share]
            if alone.sleeps and alone.generators and alone.memory_share is None:
                shares = MEMORY_SHARES[::-1]
            for share in shares:
                alone.memory_share = share
                if find_generator_shortage(alone):
                    continue
                calls = zip(alone.calls, known, strict=True)
                seconds = tuple(of_any or clock.seconds(call) for call, of_any in calls)
                if found and found[-1].cut[:2] == cut[:2] and found[-1].seconds == seconds:
                    break  # all run at once, so that more memory is of no use
                taken = {name: self._taken(alone, role, name) for name in self.capacities(devices)}
                found.append(CutOption(cut._replace(memory_share=share), seconds, taken))
        return found

    def _taken(self, alone: JobRoles, role: str, model: str) -> RoleBytes:
        """Return the bytes of the pipeline stage that takes most, in each respect."""
        memory = self.cluster.models[model].memory
        stages = [
            estimate_role_memory(alone, role, stage, memory)
            for stage in range(alone.placement.roles[role].parallel.pp)
        ]
        return RoleBytes(
            _most(one.resident for one in stages),
            _most(one.loaded for one in stages),
            _most(one.awake for one in stages),
            tuple(map(_most, zip(*(one.working.values() for one in stages), strict=True))),
        )

    def _cuts(self, role: str, apart: bool, runs: Sequence[int]) -> list[ModelCut]:
        """List every way to cut a role's model over devices that are spread over nodes like these;
        a tensor-parallel group stays inside a node."""
        number = sum(runs)
        rollout = self.config.rollout
        rollout_tps = self._tps(runs, rollout.parallel.tp, rollout.engine == "vllm")
        if role == GENERATOR_ROLE:
            generation = self.placed[ACTOR_ROLE].generation or ParallelConfig()
            return [
                ModelCut(parallel)
                for tp in rollout_tps
                if self._allowed(role, parallel := replace(generation, tp=tp), number, 1)
            ]
        place = self.placed[role]
        parallel = replace(place.parallel, dp=None)
        may_cut = self._may_cut(role)
        found = []
        pps = [parallel.pp]
        if may_cut and parallel.pp == 1:
            pps = powers_of_two(min(MAX_PP, number))
        generates = place.generation is not None and not (apart and role == ACTOR_ROLE)
        rollouts = rollout_tps if generates else [0]
        for pp in pps:
            for tp in self._tps(runs, parallel.tp, may_cut):
                cut = replace(parallel, tp=tp, pp=pp)
                if number % model_parallel_size(cut):
                    continue
                for rollout_tp, shards in product(rollouts, self._shards(cut, runs, may_cut)):
                    ranks = max(1, rollout_tp * rollout.parallel.pp)
                    whole = replace(cut, shards=shards)
                    if self._allowed(role, whole, number, ranks if rollout_tp else 1):
                        found.append(ModelCut(whole, rollout_tp))
        return found

    def _shards(self, cut: ParallelConfig, runs: Sequence[int], free: bool) -> list[int | None]:
        """List the values of `shards` to try: the given one; or over all devices, and over those of
        a node with copies on the others."""
        near = min(runs) // (cut.pp * cut.tp)
        if cut.shards is not None or not free or len(runs) == 1 or near < 2:
            return [cut.shards]
        return [None, near]

    def _tps(self, runs: Sequence[int], asked: int, free: bool) -> list[int]:
        """List the sizes of tensor-parallel groups that lie inside nodes."""
        if asked > 1 or not free:
            return [asked]
        return [tp for tp in powers_of_two(LARGEST_TP) if all(run % tp == 0 for run in runs)]

    def _may_cut(self, role: str) -> bool:
        adapts = self.placed[role].trains and self.config.actor.lora.rank
        own = (self.config.models.get(role) or {}).get("parallel")
        return self._has_model(role) and not adapts and own is None

    def _allowed(self, role: str, parallel: ParallelConfig, number: int, ranks: int) -> bool:
        """Return whether the sizes fit each other and the model."""
        if not self._has_model(role):
            return True
        path = self._planner(role == GENERATOR_ROLE).path(role)
        model = read_model_config(path)
        try:
            check_parallel_sizes(number, parallel, ranks)
            check_model_cut(parallel, model, path)
            if ranks > 1:
                generation = ParallelConfig(tp=ranks // self.config.rollout.parallel.pp)
                check_model_cut(generation, model, path)
        except ConfigError:
            return False
        return True


def _most(several: Iterable[MemoryParts]) -> float:
    return max(sum(parts.values()) for parts in several)
