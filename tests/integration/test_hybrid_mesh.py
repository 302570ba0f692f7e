"""The numbering of the 3D-HybridEngine, and what its transition costs, by simulation."""

from collections import Counter, defaultdict
from fractions import Fraction

import pytest
from weight_transitions import (
    HybridMesh,
    Parameter,
    VanillaMesh,
    count_received,
    count_sent,
    gather_all,
    nested,
    vanilla,
)

from hybridrl.config.schema import ParallelConfig
from hybridrl.layout.boxes import box_numel, intersect_boxes, subtract_boxes
from hybridrl.layout.training_mesh import build_training_mesh

RANKS = 64


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def combinations(most=RANKS):
    """Every (p, t, d, p_g, t_g) with p * t * d <= most."""
    for p in range(1, most + 1):
        for t in range(1, most // p + 1):
            for d in range(1, most // (p * t) + 1):
                for p_g in divisors(p):
                    for t_g in divisors(t):
                        yield p, t, d, p_g, t_g


def mesh_of(combination, kind=HybridMesh):
    p, t, d, p_g, t_g = combination
    return kind(pp=p, tp=t, dp=d, rollout_pp=p_g, rollout_tp=t_g)


def model(mesh):
    """One parameter per training stage, in as many elements as tensor parallel ranks."""
    return {f"{s}": Parameter((mesh.tp,), dim=0, stage=s) for s in range(mesh.pp)}


def groups(mesh, *axes):
    """Ranks that differ on these axes only, each numbered from 1 as the paper does."""
    found = defaultdict(set)
    for rank in range(mesh.size):
        at = {axis: place.index for axis, place in mesh.coordinates(rank).items()}
        # The paper counts along its consecutive training mesh.
        counted = (at["dp"] * mesh.pp + at["pp"]) * mesh.tp + at["tp"] + 1
        found[tuple(at[axis] for axis in axes)].add(counted)
    return sorted(map(sorted, found.values()))


def box(index, count, parts):
    """Of one dim: what part `index` of `parts` holds of `count` elements."""
    return index * (count // parts), (index + 1) * (count // parts)


def test_every_combination_nests_in_groups_of_size_and_receives_by_the_formula():
    """The model as one tensor of stages by tensor parallel ranks; the first and the last of the
    training replicas stand for all."""
    for combination in combinations():
        mesh = mesh_of(combination)
        p, t, d, p_g, t_g = combination
        volume_of_formula = Fraction(t * p - t_g * p_g, t_g * p_g * t * p) * (p * t)
        micro, training, generation = Counter(), set(), set()
        for rank in {*range(p * t), *range(mesh.size - p * t, mesh.size)}:
            at = {axis: place.index for axis, place in mesh.coordinates(rank).items()}
            assert at["dp"] == rank // (p * t)
            shard = (box(at["pp"], p, p), box(at["tp"], t, t))
            wanted = (box(at["rollout_pp"], p, p_g), box(at["rollout_tp"], t, t_g))
            assert intersect_boxes(shard, wanted) == shard, combination
            assert box_numel(wanted) - box_numel(shard) == volume_of_formula, combination
            assert at["rollout_dp"] == at["dp"] * mesh.micro_dp + at["micro_dp"]
            # Generation replicas are consecutive ranks, as vLLM wants them.
            assert (at["rollout_dp"] * p_g + at["rollout_pp"]) * t_g + at["rollout_tp"] == rank
            micro[at["dp"], at["rollout_pp"], at["rollout_tp"]] += 1
            training.add((at["dp"], shard))
            generation.add((at["rollout_dp"], wanted))
        assert set(micro.values()) == {p * t // (p_g * t_g)}, combination
        assert len(training) == len(generation) == p * t * min(d, 2), combination


LARGE = [(1, 64, 1, 1, 8), (8, 8, 1, 2, 4), (4, 8, 2, 1, 8), (2, 8, 4, 2, 1), (16, 1, 4, 4, 1)]


def test_plans_move_what_the_formula_says():
    for combination in [*combinations(16), *LARGE]:
        mesh = mesh_of(combination)
        p, t, _, p_g, t_g = combination
        transition = nested(mesh, model(mesh))
        plan = transition.gather()
        received, sent = count_received(plan), count_sent(plan)
        wanted = Fraction(t * p - t_g * p_g, t_g * p_g * t * p) * (p * t)
        assert {received[rank] for rank in range(mesh.size)} == {wanted}, combination
        assert {sent[rank] for rank in range(mesh.size)} == {wanted}, combination
        assert not any(transition.redundant().values()), combination
        assert set(transition.peak().values()) == {p * t // (t_g * p_g)}, combination
        # Nothing leaves its training replica, although the others hold the same.
        ends = {(m.sender // (p * t), rank // (p * t)) for m in plan.moves for rank in m.receivers}
        assert all(sender == receiver for sender, receiver in ends), combination


@pytest.mark.parametrize("arm", [vanilla, gather_all])
def test_the_other_arms_cost_what_the_paper_says(arm):
    for combination in combinations(10):
        p, t, d, _, _ = combination
        mesh = mesh_of(combination, VanillaMesh)
        parts, size = (t * p if arm is vanilla else t * p * d), p * t * d * p
        parameters = {f"{s}": Parameter((p * t * d, 1), dim=0, stage=s) for s in range(p)}
        transition = arm(mesh, parameters)
        received = count_received(transition.gather())
        wanted = size * (parts - 1) // parts
        assert {received[rank] for rank in range(mesh.size)} == {wanted}, combination
        assert set(transition.peak().values()) == {size}, combination
        assert max(transition.redundant().values()) <= size // parts, combination
        assert not transition.keep().moves, combination


def test_example_of_figure_8b():
    combination = (1, 4, 2, 1, 2)
    mesh = mesh_of(combination)
    assert groups(mesh, "dp", "pp") == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert groups(mesh, "pp", "tp") == [[1, 5], [2, 6], [3, 7], [4, 8]]
    assert groups(mesh, "rollout_dp", "rollout_pp") == [[1, 3], [2, 4], [5, 7], [6, 8]]
    assert groups(mesh, "dp", "rollout_pp", "rollout_tp") == [[1, 2], [3, 4], [5, 6], [7, 8]]
    plain = mesh_of(combination, VanillaMesh)
    assert groups(plain, "rollout_dp", "rollout_pp") == [[1, 2], [3, 4], [5, 6], [7, 8]]
    transition = vanilla(plain, model(plain))
    outside = [
        rank + 1
        for rank, pieces in transition.training.pieces.items()
        if subtract_boxes(pieces["0"][0].box, [transition.generation.pieces[rank]["0"][0].box])
    ]
    assert outside == [2, 3, 6, 7]
    assert [r + 1 for r, elements in transition.redundant().items() if elements] == outside
    assert {transition.redundant()[rank - 1] for rank in outside} == {4 // 4}


def test_example_of_figure_7():
    mesh = mesh_of((1, 2, 2, 1, 1))
    assert groups(mesh, "dp", "pp") == [[1, 2], [3, 4]]
    assert groups(mesh, "dp", "rollout_pp", "rollout_tp") == [[1, 2], [3, 4]]
    assert groups(mesh, "rollout_dp", "rollout_pp") == [[1], [2], [3], [4]]


def test_training_ranks_are_a_permutation_for_a_device_mesh():
    assert HybridMesh(1, 4, 2, 1, 2).training_ranks() == [[[0, 2, 1, 3]], [[4, 6, 5, 7]]]
    assert VanillaMesh(1, 4, 2, 1, 2).training_ranks() == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_training_meshes_are_numbered_so():
    for p, t, d, p_g, t_g in combinations(24):
        if p_g > 1:
            continue
        found = build_training_mesh(p * t * d, ParallelConfig(pp=p, tp=t), t_g)
        ranks = HybridMesh(p, t, d, rollout_tp=t_g).training_ranks()
        assert found.grid == tuple(rank for replica in ranks for stage in replica for rank in stage)
