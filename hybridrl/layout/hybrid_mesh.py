"""The rank numbering of the 3D-HybridEngine: the coordinates of each rank in training and in
generation.

Training runs on (pp, tp, dp), generation on (rollout_pp, rollout_tp); all ranks do both. Where the
generation sizes divide the training sizes, each training replica becomes ``micro_dp = pp * tp /
(rollout_pp * rollout_tp)`` generation replicas. HybridFlow (Sheng et al., EuroSys 2025, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from hybridrl.errors import ConfigError
from hybridrl.layout.rank_mesh import MeshCoordinate, RankMesh


@dataclass(frozen=True)
class HybridMesh:
    """A mesh on which every rank's training shard lies inside its generation shard.

    A generation replica is `rollout_tp` consecutive ranks for each stage, one stage after the
    other, as vLLM wants them. What makes the shards nest is the order of the training ranks: tensor
    ranks `t_idx` of one generation shard, ``t_idx // (tp / rollout_tp)``, stand in different
    replicas of generation. (The paper numbers training consecutively and generation with strides:
    the same groups under other numbers.)

    Raises:
        ConfigError: if a size is not positive, or a generation size does not divide its training
            size.
    """

    pp: int
    tp: int
    dp: int
    rollout_pp: int = 1
    rollout_tp: int = 1

    def __post_init__(self) -> None:
        _check_positive(self)
        for axis in ("pp", "tp"):
            training, generation = getattr(self, axis), getattr(self, f"rollout_{axis}")
            if training % generation:
                possible = [n for n in range(1, training + 1) if training % n == 0]
                raise ConfigError(
                    f"rollout.parallel.{axis}={generation} does not divide actor.parallel.{axis}="
                    f"{training}, so training shards cannot lie inside generation shards. Set "
                    f"rollout.parallel.{axis} to one of {possible}."
                )

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


def _check_positive(mesh: HybridMesh) -> None:
    for field in fields(mesh):
        size = getattr(mesh, field.name)
        if size < 1:
            setting = (
                f"rollout.parallel.{field.name.removeprefix('rollout_')}"
                if field.name.startswith("rollout_")
                else f"actor.parallel.{field.name}"
            )
            raise ConfigError(f"{setting}={size}: expected 1 or more.")
