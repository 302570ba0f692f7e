"""The search for a placement finds what going through all of them finds."""

import random
from itertools import product

import pytest
from tiers import few_of

from hybridrl.planner.search.memory_states import prune_options
from hybridrl.planner.search.placement_search import search_placements
from hybridrl.planner.search.placement_space import (
    PlacementShape,
    list_device_ranges,
    list_partitions,
    list_split_points,
)
from hybridrl.planner.search.search_terms import CutOption, RoleBytes, SearchObjective
from hybridrl.planner.step.step_calls import PlannedCall
from hybridrl.planner.step.step_time import SteadyStateReplay


def test_partitions_are_as_many_as_bell_says():
    counts = [len(set(list_partitions("abcde"[:k]))) for k in range(6)]
    assert counts == [1, 1, 2, 5, 15, 52]


def test_devices_are_dealt_out_in_every_way():
    assert [len(list(list_device_ranges(list_split_points(8), k))) for k in (1, 2, 3)] == [
        1,
        7,
        21,
    ]  # C(N-1, k-1)
    assert len(list(list_device_ranges(list_split_points(8), 2, in_any_order=True))) == 14
    assert list_split_points(128) == [*range(0, 129, 8)] and list_split_points(1000)[-2:] == [
        960,
        1000,
    ]
    for found in list_device_ranges(list_split_points(12), 3):
        assert [d for part in found for d in part] == list(range(12))


class RandomCosts:
    """Tables of numbers, that know no model."""

    def __init__(self, seed):
        dice = self.dice = random.Random(seed)
        self.roles = ["actor", "critic", "reference", "reward"][: dice.randint(1, 4)]
        self.learning = [role for role in self.roles if role in ("actor", "critic")]
        self.separable = dice.random() < 0.7
        self.differ = dice.random() < 0.3
        self.devices = dice.randint(1, 4 if len(self.roles) < 4 else 3)
        self.models = [dice.choice("xy") if self.differ else "x" for _ in range(self.devices)]
        self.variants = [(), (("small", True),)][: dice.randint(1, 2)]
        self.staleness = dice.choice([0, 0, 1, 2])
        self.room = {"x": dice.randint(20, 60), "y": dice.randint(20, 60)}
        self._made = {}

    def calls(self, apart):
        generates = "generator" if apart else "actor"
        calls = [PlannedCall(generates, "sync", 1), PlannedCall(generates, "generate", 1)]
        calls += [PlannedCall(role, "score", 1) for role in self.roles]
        return calls + [PlannedCall(role, "train", 1) for role in self.learning]

    def options(self, variant, apart, role, devices):
        return prune_options(self.all_options(variant, apart, role, devices))

    def all_options(self, variant, apart, role, devices):
        key = variant, apart, role, devices
        if key not in self._made:
            dice = random.Random(f"{self.room}{key[1:]}")  # memory and seconds of the asked, less
            number = sum(call.role == role for call in self.calls(apart))
            kinds = dict.fromkeys(self.models[d] for d in devices)
            self._made[key] = [
                CutOption(
                    cut,
                    tuple(
                        dice.randint(1, 20) / len(devices) + bool(variant) for _ in range(number)
                    ),
                    {
                        kind: RoleBytes(
                            dice.randint(0, 20) / (1 + bool(variant)),
                            dice.randint(0, 15) / (1 + bool(variant)),
                            dice.choice([0, 9]),
                            tuple(dice.randint(0, 15) for _ in range(number)),
                        )
                        for kind in kinds
                    },
                )
                for cut in range(dice.randint(0, 3) if dice.random() < 0.3 else 5 - len(self.roles))
            ]
        return self._made[key]

    def capacities(self, devices):
        return {self.models[d]: self.room[self.models[d]] for d in devices}

    def process(self, apart, roles):
        return 1.0 + ("generator" in roles)

    def offloads(self, variant):
        return bool(variant)


def fits(costs, shape, variant, where, chosen):
    for device in {d for devices in where.values() for d in devices}:
        here = [role for role, devices in where.items() if device in devices]
        model = costs.models[device]
        taken = [chosen[role].taken[model] for role in here]
        process = costs.process(shape.is_separated, here)
        moments, built = [process + sum(t.resident for t in taken)], process
        if costs.offloads(variant):
            moments = [process + t.resident + w for t in taken for w in t.working]
        else:
            moments += [moments[0] + w for t in taken for w in t.working]
        for t in taken:
            built += t.loaded
            moments.append(built + t.awake)
        if max(moments) > costs.room[model]:
            return False
    return True


def all_shapes(costs):
    """By giving each role the number of its set, in every way."""
    found = {}
    for roles in [costs.roles] + ([[*costs.roles, "generator"]] if costs.separable else []):
        for labels in product(range(len(roles)), repeat=len(roles)):
            sets = [tuple(r for r, x in zip(roles, labels, strict=True) if x == n) for n in labels]
            sets = tuple(dict.fromkeys(sets))
            if not any("actor" in some and "generator" in some for some in sets):
                found[frozenset(sets), ()] = PlacementShape(sets)
    scoring = [role for role in costs.roles if role not in costs.learning]
    if len(scoring) == 2:
        found["interleaving"] = PlacementShape(tuple((r,) for r in scoring), tuple(costs.learning))
    return list(found.values())


def brute_force(costs, objective, totals):
    """By shape (whatever the order of its sets), the best value."""
    best = {}
    for total, shape, variant in product(totals, all_shapes(costs), costs.variants):
        for bounds in product(range(1, total + 1), repeat=len(shape.sets)):
            if sum(bounds) != total:
                continue
            for order in orders(costs, shape):
                start, where = 0, dict.fromkeys(shape.everywhere, range(total))
                for some, size in zip(order, bounds, strict=True):
                    where |= dict.fromkeys(some, range(start, start + size))
                    start += size
                roles = list(shape.roles)
                apart = shape.is_separated
                per_role = [costs.all_options(variant, apart, r, where[r]) for r in roles]
                for options in product(*per_role):
                    chosen = dict(zip(roles, options, strict=True))
                    placed = {role: where[role] for role in roles}
                    if not fits(costs, shape, variant, placed, chosen):
                        continue
                    rest = {role: iter(option.seconds) for role, option in chosen.items()}
                    timed = [(call, next(rest[call.role])) for call in costs.calls(apart)]
                    staleness = costs.staleness if "generator" in roles else 0
                    step = SteadyStateReplay(timed, placed, staleness).seconds
                    key = frozenset(shape.sets), shape.everywhere
                    value = objective.of(step, total)
                    best[key] = min(value, best.get(key, value))
    return best


def orders(costs, shape):
    from itertools import permutations

    return list(permutations(shape.sets)) if costs.differ else [shape.sets]


@pytest.mark.parametrize("seed", few_of(range(120), 6))
def test_the_search_finds_what_brute_force_finds(seed):
    costs = RandomCosts(seed)
    objective = SearchObjective(
        lambda step, devices: (round(step * devices**0.5, 9),), seed % 4 == 0
    )
    totals = range(1, costs.devices + 1) if objective.with_fewer else [costs.devices]
    expected = sorted(brute_force(costs, objective, totals).values())
    report = search_placements(costs, objective, deadline_s=600)
    assert report.complete
    assert [found.value for found in report.best] == expected[:5]
    for found in report.best:
        calls = costs.calls(found.shape.is_separated)
        assert {call.role for call in calls} <= set(found.where) == set(found.cuts)
    if not expected:
        assert all(lack > 1 for lack in report.misfits.values())


def test_what_is_not_accepted_is_not_proposed():
    costs = RandomCosts(3)
    best = search_placements(costs).best
    others = search_placements(costs, accept=lambda found: found.shape != best[0].shape).best
    assert [found.shape for found in others] == [found.shape for found in best[1:]]


def test_a_deadline_gives_what_was_found_so_far():
    report = search_placements(RandomCosts(3), deadline_s=0)
    assert not report.complete and len(report.best) <= 5
