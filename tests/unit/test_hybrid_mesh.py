"""The numbering of the 3D-HybridEngine, and what its transition costs, by simulation."""

from collections import Counter, defaultdict
from fractions import Fraction

import pytest

from hybridrl.core.boxes import subtract_all
from hybridrl.core.hybrid_mesh import HybridMesh, VanillaMesh
from hybridrl.core.transition import Parameter, gather_all, nested, vanilla
from hybridrl.errors import ConfigError

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


def test_training_shards_lie_in_generation_shards_and_groups_are_of_size():
    for combination in combinations():
        mesh = mesh_of(combination)
        p, t, d, p_g, t_g = combination
        micro, training, generation = Counter(), set(), set()
        for rank in range(mesh.size):
            at = {axis: place.index for axis, place in mesh.coordinates(rank).items()}
            assert at["pp"] // (p // p_g) == at["rollout_pp"], combination
            assert at["tp"] // (t // t_g) == at["rollout_tp"], combination
            assert at["rollout_dp"] == at["dp"] * mesh.micro_dp + at["micro_dp"]
            # Generation replicas are consecutive ranks, as vLLM wants them.
            assert (at["rollout_dp"] * p_g + at["rollout_pp"]) * t_g + at["rollout_tp"] == rank
            micro[at["dp"], at["rollout_pp"], at["rollout_tp"]] += 1
            training.add((at["dp"], at["pp"], at["tp"]))
            generation.add((at["rollout_dp"], at["rollout_pp"], at["rollout_tp"]))
        assert set(micro.values()) == {p * t // (p_g * t_g)}, combination
        assert len(training) == len(generation) == p * t * d


def test_the_formula_holds_for_every_combination():
    for combination in combinations():
        mesh = mesh_of(combination)
        p, t, d, p_g, t_g = combination
        transition = nested(mesh, model(mesh))
        volume = Fraction(t * p - t_g * p_g, t_g * p_g * t * p) * (p * t)
        plan = transition.gather()
        assert all(plan.received()[rank] == volume for rank in range(mesh.size)), combination
        assert all(plan.sent()[rank] == volume for rank in range(mesh.size)), combination
        assert not any(transition.redundant().values()), combination
        assert set(transition.peak().values()) == {p * t // (t_g * p_g)}, combination
        replica = p * t
        assert all(m.sender // replica == m.receiver // replica for m in plan.moves), combination


@pytest.mark.parametrize("combination", list(combinations(12)))
def test_the_other_arms_cost_what_the_paper_says(combination):
    p, t, d, _, _ = combination
    mesh = mesh_of(combination, VanillaMesh)
    ranks, size = range(mesh.size), p * t * d * p
    parameters = {f"{s}": Parameter((p * t * d, 1), dim=0, stage=s) for s in range(p)}
    for arm, parts in ((vanilla, t * p), (gather_all, t * p * d)):
        transition = arm(mesh, parameters)
        plan = transition.gather()
        assert {plan.received()[rank] for rank in ranks} == {size * (parts - 1) // parts}
        assert set(transition.peak().values()) == {size}
        assert max(transition.redundant().values()) <= size // parts
        assert not transition.keep().moves


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
        if subtract_all(pieces["0"][0].box, [transition.generation.pieces[rank]["0"][0].box])
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


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (
            (1, 4, 1, 1, 3),
            r"rollout.parallel.tp=3 does not divide actor.parallel.tp=4.*\[1, 2, 4\]",
        ),
        ((2, 1, 1, 4, 1), r"rollout.parallel.pp=4 does not divide actor.parallel.pp=2"),
        ((1, 0, 1, 1, 1), r"actor.parallel.tp=0: expected 1 or more"),
        ((1, 1, 1, 1, -1), r"rollout.parallel.tp=-1: expected 1 or more"),
    ],
)
def test_impossible_sizes_are_sentences(sizes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        HybridMesh(*sizes)
