"""Ways to live on devices: which roles share some, and how many these are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations

from hybridrl.placement import ACTOR_ROLE, GENERATOR_ROLE

_MAX_DEVICE_PARTS = 16
"""Devices are dealt out in about so many parts, or one by one where there are fewer."""
MAX_PP = 8


@dataclass(frozen=True)
class PlacementShape:
    """A partition of the roles into sets that share devices.

    Attributes:
        sets: Roles by set; each set has devices of its own.
        everywhere: Roles that live on the devices of all sets: what learns, when those that only
            score are on parts of the devices (interleaving).
    """

    sets: tuple[tuple[str, ...], ...]
    everywhere: tuple[str, ...] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        return self.everywhere + tuple(role for some in self.sets for role in some)

    @property
    def is_separated(self) -> bool:
        """Return whether generation has devices of its own."""
        return GENERATOR_ROLE in self.roles

    def __str__(self) -> str:
        sets = " | ".join(" + ".join(some) for some in self.sets)
        return f"{' + '.join(self.everywhere)} everywhere, {sets}" if self.everywhere else sets


def list_partitions(roles: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield every partition of roles into sets: 1, 2, 5, 15, 52 for 1 to 5 roles (Bell's
    numbers)."""
    if not roles:
        yield ()
        return
    *others, last = roles
    for found in list_partitions(others):
        for number, some in enumerate(found):
            yield (*found[:number], (*some, last), *found[number + 1 :])
        yield (*found, (last,))


def list_shapes(
    roles: Sequence[str], learning: Sequence[str], separable: bool
) -> Iterator[PlacementShape]:
    """Yield every shape of these roles.

    Args:
        learning: Those of them that learn.
        separable: Whether generation may have devices of its own.
    """
    for sets in list_partitions(roles):
        yield PlacementShape(sets)
    scoring = [role for role in roles if role not in learning]
    if learning and len(scoring) > 1:
        for sets in list_partitions(scoring):
            if len(sets) > 1:
                yield PlacementShape(sets, tuple(learning))
    if separable:
        for sets in list_partitions([*roles, GENERATOR_ROLE]):
            if not any(ACTOR_ROLE in some and GENERATOR_ROLE in some for some in sets):
                yield PlacementShape(sets)


def list_split_points(devices: int) -> list[int]:
    """List the positions at which devices may be split: after each device, or after every 2, 4, 8
    ..., so that there are at most `_MAX_DEVICE_PARTS` parts."""
    unit = 1
    while devices > _MAX_DEVICE_PARTS * unit:
        unit *= 2
    return [*range(0, devices, unit), devices]


def list_device_ranges(
    marks: Sequence[int], sets: int, in_any_order: bool = False
) -> Iterator[list[range]]:
    """Yield every way to split devices into consecutive ranges, one for each set.

    Args:
        marks: Where they may be parted.
        in_any_order: The first set need not have the first devices: for devices that differ.
    """
    for inner in combinations(marks[1:-1], sets - 1):
        bounds = [marks[0], *inner, marks[-1]]
        found = [range(a, b) for a, b in pairwise(bounds)]
        if not in_any_order:
            yield found
            continue
        for order in permutations(found):
            yield list(order)


def powers_of_two(limit: int) -> list[int]:
    """Return the powers of two up to a limit."""
    return [2**power for power in range(limit.bit_length())]
