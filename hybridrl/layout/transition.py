"""Three ways to bring weights from training to generation, as layouts.

The arms that the HybridFlow paper compares in Table 2 (M: all parameters; p, t, d: training
pipeline, tensor and data parallel sizes; p_g, t_g: those of generation):

============  ==================================  =============  ==========================
arm           received by a rank                  peak           redundant, at most
============  ==================================  =============  ==========================
gather_all    (tpd - 1) / (tpd) M                 M              M / (tpd)
vanilla       (tp - 1) / (tp) M                   M              M / (tp)
nested        (tp - t_g p_g) / (t_g p_g tp) M     M / (t_g p_g)  0
============  ==================================  =============  ==========================

A real model's layouts come from its own shards; these describe a model by how each parameter is
cut, which is all that a simulation, a planner or a benchmark needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hybridrl.layout.boxes import shard_box, whole
from hybridrl.layout.footprint import peak, redundant
from hybridrl.layout.hybrid_mesh import HybridMesh, VanillaMesh
from hybridrl.layout.tensor_layout import Layout, Plan
from hybridrl.layout.tensor_pieces import Piece, flat_pieces, local_pieces
from hybridrl.layout.transfer_planner import plan


class Parameter(NamedTuple):
    """How a parameter is cut.

    Attributes:
        shape: Of the whole parameter.
        dim: The dim that tensor parallelism cuts; None: each of its ranks has all.
        stage: The training pipeline stage it belongs to.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    stage: int = 0


@dataclass(frozen=True)
class Transition:
    """From training to generation, by way of what each rank gathers.

    Attributes:
        training: What each rank holds while it trains, and keeps.
        gathered: What each rank has when the last byte has come.
        generation: What it keeps of that.
    """

    training: Layout
    gathered: Layout
    generation: Layout

    def gather(self) -> Plan:
        """All moves of the transition."""
        return plan(self.training, self.gathered)

    def keep(self) -> Plan:
        """Copies inside each rank from what it gathered to what it generates with."""
        return plan(self.gathered, self.generation)

    def peak(self) -> dict[int, int]:
        """Elements of parameters on each rank at the fullest moment."""
        return peak(self.training, self.gathered, self.generation)

    def redundant(self) -> dict[int, int]:
        """Elements on each rank that are kept for training only while it generates."""
        return redundant(self.training, self.generation)


def nested(mesh: HybridMesh, parameters: Mapping[str, Parameter]) -> Transition:
    """Each rank receives what its generation shard lacks, and nothing else."""
    generation = generation_layout(mesh, parameters)
    return Transition(training_layout(mesh, parameters), generation, generation)


def vanilla(mesh: VanillaMesh, parameters: Mapping[str, Parameter]) -> Transition:
    """HybridFlow-V: each training replica gathers the whole model, then each rank keeps its part,
    which may share nothing with what it trains."""
    everything = whole_layout(mesh.size, parameters)
    generation = generation_layout(mesh, parameters)
    return Transition(training_layout(mesh, parameters), everything, generation)


def gather_all(mesh: VanillaMesh, parameters: Mapping[str, Parameter]) -> Transition:
    """DeepSpeed-Chat: training shards every parameter flat over all ranks (ZeRO-3), all ranks
    gather the whole model, then each keeps its part."""
    everything = whole_layout(mesh.size, parameters)
    generation = generation_layout(mesh, parameters)
    return Transition(flat_layout(mesh.size, parameters), everything, generation)


def training_layout(mesh: HybridMesh, parameters: Mapping[str, Parameter]) -> Layout:
    """Stages over `pp`, cut dims over `tp`, replicas over `dp`."""
    return _layout(mesh, parameters, "pp", "tp", 1)


def generation_layout(mesh: HybridMesh, parameters: Mapping[str, Parameter]) -> Layout:
    """Training stages side by side in `rollout_pp` stages, cut dims over `rollout_tp`."""
    return _layout(mesh, parameters, "rollout_pp", "rollout_tp", mesh.pp // mesh.rollout_pp)


def flat_layout(ranks: int, parameters: Mapping[str, Parameter]) -> Layout:
    """ZeRO-3: one run of each flattened parameter per rank, ``ceil(elements / ranks)`` long."""
    pieces: dict[int, dict[str, tuple[Piece, ...]]] = {rank: {} for rank in range(ranks)}
    for name, parameter in parameters.items():
        elements = math.prod(parameter.shape)
        for rank, here in pieces.items():
            ((start, stop),) = shard_box((elements,), [(0, rank, ranks)])
            here[name] = flat_pieces(name, parameter.shape, start, stop)
    return Layout(_shapes(parameters), pieces)


def whole_layout(ranks: int, parameters: Mapping[str, Parameter]) -> Layout:
    """Everything on every rank."""
    here = {name: local_pieces(name, whole(each.shape)) for name, each in parameters.items()}
    return Layout(_shapes(parameters), dict.fromkeys(range(ranks), here))


def _layout(
    mesh: HybridMesh, parameters: Mapping[str, Parameter], pp: str, tp: str, stages: int
) -> Layout:
    pieces: dict[int, dict[str, tuple[Piece, ...]]] = {}
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        pieces[rank] = {}
        for name, (shape, dim, stage) in parameters.items():
            if stage // stages == at[pp].index:
                shards = [] if dim is None else [(dim, at[tp].index, at[tp].size)]
                pieces[rank][name] = local_pieces(name, shard_box(shape, shards))
    return Layout(_shapes(parameters), pieces)


def _shapes(parameters: Mapping[str, Parameter]) -> dict[str, tuple[int, ...]]:
    return {name: parameter.shape for name, parameter in parameters.items()}
