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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hybridrl.errors import ConfigError
from hybridrl.layout.boxes import (
    Box,
    Piece,
    box_numel,
    chunk_range,
    flat_range_boxes,
    full_box,
    make_local_pieces,
)
from hybridrl.layout.rank_mesh import MeshCoordinate, RankMesh
from hybridrl.layout.tensor_layout import (
    TensorLayout,
    TransferPlan,
    compute_peak_elements,
    compute_redundant_elements,
)
from hybridrl.layout.transfer_planner import plan_transfer


def count_received(plan: TransferPlan) -> Counter[int]:
    """Return the number of elements that each rank receives from others."""
    found: Counter[int] = Counter()
    for move in plan.moves:
        found.update(dict.fromkeys(move.receivers, box_numel(move.box)))
    return found


def count_sent(plan: TransferPlan) -> Counter[int]:
    """Return the number of elements that each rank sends to others."""
    found: Counter[int] = Counter()
    for move in plan.moves:
        found[move.sender] += box_numel(move.box) * len(move.receivers)
    return found


@dataclass(frozen=True)
class HybridMesh:
    """A mesh on which every rank's training shard lies inside its generation shard: the numbers of
    the 3D-HybridEngine (HybridFlow, Sheng et al., EuroSys 2025, section 5).

    Training runs on (pp, tp, dp), generation on (rollout_pp, rollout_tp), whose sizes divide those
    of training; all ranks do both. Each training replica becomes ``micro_dp = pp * tp /
    (rollout_pp * rollout_tp)`` generation replicas.

    A generation replica is `rollout_tp` consecutive ranks for each stage, one stage after the
    other, as vLLM wants them. What makes the shards nest is the order of the training ranks: tensor
    ranks `t_idx` of one generation shard, ``t_idx // (tp / rollout_tp)``, stand in different
    replicas of generation. (The paper numbers training consecutively and generation with strides:
    the same groups under other numbers.)
    """

    pp: int
    tp: int
    dp: int
    rollout_pp: int = 1
    rollout_tp: int = 1

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.pp * self.tp * self.dp

    @property
    def micro_dp(self) -> int:
        """The number of generation replicas in one training replica."""
        return self.pp * self.tp // (self.rollout_pp * self.rollout_tp)

    def coordinates(self, rank: int) -> dict[str, MeshCoordinate]:
        """Return the coordinates of `rank` on the training axes `dp`, `pp`, `tp`, on the generation
        axes `rollout_dp`, `rollout_pp`, `rollout_tp`, and on `micro_dp`, which numbers the
        generation replicas inside a training replica."""
        at = {axis: place.index for axis, place in self._grid.coordinates(rank).items()}
        inner_pp, inner_tp = self.pp // self.rollout_pp, self.tp // self.rollout_tp
        return self._place(
            pp=at["rollout_pp"] * inner_pp + at["inner_pp"],
            tp=at["rollout_tp"] * inner_tp + at["inner_tp"],
            dp=at["dp"],
            rollout_pp=at["rollout_pp"],
            rollout_tp=at["rollout_tp"],
            micro_dp=at["inner_pp"] * inner_tp + at["inner_tp"],
        )

    def training_ranks(self) -> list[list[list[int]]]:
        """Return the ranks at their training coordinates, `[dp][pp][tp]`, as torch's `DeviceMesh`
        takes them."""
        ranks = [[[-1] * self.tp for _ in range(self.pp)] for _ in range(self.dp)]
        for rank in range(self.size):
            at = self.coordinates(rank)
            ranks[at["dp"].index][at["pp"].index][at["tp"].index] = rank
        return ranks

    @cached_property
    def _grid(self) -> RankMesh:
        axes = {"dp": self.dp, "inner_pp": self.pp // self.rollout_pp}
        axes |= {"inner_tp": self.tp // self.rollout_tp}
        return RankMesh(axes | {"rollout_pp": self.rollout_pp, "rollout_tp": self.rollout_tp})

    def _place(
        self, pp: int, tp: int, dp: int, rollout_pp: int, rollout_tp: int, micro_dp: int
    ) -> dict[str, MeshCoordinate]:
        return {
            "dp": MeshCoordinate(dp, self.dp),
            "pp": MeshCoordinate(pp, self.pp),
            "tp": MeshCoordinate(tp, self.tp),
            "rollout_dp": MeshCoordinate(dp * self.micro_dp + micro_dp, self.dp * self.micro_dp),
            "rollout_pp": MeshCoordinate(rollout_pp, self.rollout_pp),
            "rollout_tp": MeshCoordinate(rollout_tp, self.rollout_tp),
            "micro_dp": MeshCoordinate(micro_dp, self.micro_dp),
        }


@dataclass(frozen=True)
class VanillaMesh(HybridMesh):
    """HybridFlow-V: both meshes fill consecutive ranks, `tp` first, then `pp`, then `dp`.

    The paper's baseline: some ranks generate with a shard that shares nothing with the one they
    train, and keep both.
    """

    def coordinates(self, rank: int) -> dict[str, MeshCoordinate]:
        """As `HybridMesh.coordinates`."""
        training = RankMesh({"dp": self.dp, "pp": self.pp, "tp": self.tp})
        axes = {"dp": self.dp, "micro_dp": self.micro_dp}
        axes |= {"rollout_pp": self.rollout_pp, "rollout_tp": self.rollout_tp}
        found = training.coordinates(rank) | RankMesh(axes).coordinates(rank)
        return self._place(**{axis: place.index for axis, place in found.items()})


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

    training: TensorLayout
    gathered: TensorLayout
    generation: TensorLayout

    def gather(self) -> TransferPlan:
        """All moves of the transition."""
        return plan_transfer(self.training, self.gathered)

    def keep(self) -> TransferPlan:
        """Copies inside each rank from what it gathered to what it generates with."""
        return plan_transfer(self.gathered, self.generation)

    def peak(self) -> dict[int, int]:
        """Elements of parameters on each rank at the fullest moment."""
        return compute_peak_elements(self.training, self.gathered, self.generation)

    def redundant(self) -> dict[int, int]:
        """Elements on each rank that are kept for training only while it generates."""
        return compute_redundant_elements(self.training, self.generation)


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


def training_layout(mesh: HybridMesh, parameters: Mapping[str, Parameter]) -> TensorLayout:
    """Stages over `pp`, cut dims over `tp`, replicas over `dp`."""
    return _layout(mesh, parameters, "pp", "tp", 1)


def generation_layout(mesh: HybridMesh, parameters: Mapping[str, Parameter]) -> TensorLayout:
    """Training stages side by side in `rollout_pp` stages, cut dims over `rollout_tp`."""
    return _layout(mesh, parameters, "rollout_pp", "rollout_tp", mesh.pp // mesh.rollout_pp)


def flat_layout(ranks: int, parameters: Mapping[str, Parameter]) -> TensorLayout:
    """ZeRO-3: one run of each flattened parameter per rank, ``ceil(elements / ranks)`` long."""
    pieces: dict[int, dict[str, tuple[Piece, ...]]] = {rank: {} for rank in range(ranks)}
    for name, parameter in parameters.items():
        elements = math.prod(parameter.shape)
        for rank, here in pieces.items():
            ((start, stop),) = shard_box((elements,), [(0, rank, ranks)])
            here[name] = flat_pieces(name, parameter.shape, start, stop)
    return TensorLayout(_shapes(parameters), pieces)


def whole_layout(ranks: int, parameters: Mapping[str, Parameter]) -> TensorLayout:
    """Everything on every rank."""
    here = {
        name: make_local_pieces(name, full_box(each.shape)) for name, each in parameters.items()
    }
    return TensorLayout(_shapes(parameters), dict.fromkeys(range(ranks), here))


def _layout(
    mesh: HybridMesh, parameters: Mapping[str, Parameter], pp: str, tp: str, stages: int
) -> TensorLayout:
    pieces: dict[int, dict[str, tuple[Piece, ...]]] = {}
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        pieces[rank] = {}
        for name, (shape, dim, stage) in parameters.items():
            if stage // stages == at[pp].index:
                shards = [] if dim is None else [(dim, at[tp].index, at[tp].size)]
                pieces[rank][name] = make_local_pieces(name, shard_box(shape, shards))
    return TensorLayout(_shapes(parameters), pieces)


def _shapes(parameters: Mapping[str, Parameter]) -> dict[str, tuple[int, ...]]:
    return {name: parameter.shape for name, parameter in parameters.items()}


def even_range(length: int, index: int, count: int) -> tuple[int, int]:
    """The rule of `torch.tensor_split`: parts differ by one at most, the first are larger."""
    size, larger = divmod(length, count)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


def shard_box(
    shape: Iterable[int],
    shards: Iterable[tuple[int, int, int]],
    cut: Callable[[int, int, int], tuple[int, int]] = chunk_range,
) -> Box:
    """What is left of a tensor after cutting it several times.

    Args:
        shards: (dim, index, count) of each cut, in the order in which they are made. Two cuts of
            one dim are nested: tensor parallelism first, then FSDP inside each of its parts.
        cut: How a length is divided.

    Returns:
        A box, possibly empty.
    """
    box = list(full_box(shape))
    for dim, index, count in shards:
        if not (-len(box) <= dim < len(box) and 0 <= index < count):
            raise ConfigError(
                f"Part {index} of {count} along dim {dim} does not exist in a tensor of "
                f"{len(box)} dims. Expected a dim that it has, and 0 <= index < count."
            )
        start, stop = box[dim]
        low, high = cut(stop - start, index, count)
        box[dim] = (start + low, start + high)
    return tuple(box)


def flat_pieces(name: str, shape: Sequence[int], start: int, stop: int) -> tuple[Piece, ...]:
    """The pieces of a rank that holds elements ``[start, stop)`` of the flattened tensor.

    Each box is one run of the flat shard; as a local tensor of its own shape, a view of that run,
    it is called ``{name}/0``, ``{name}/1`` and so on.
    """
    boxes = flat_range_boxes(shape, start, stop)
    return tuple(Piece(box, f"{name}/{i}", (0,) * len(box)) for i, box in enumerate(boxes))
