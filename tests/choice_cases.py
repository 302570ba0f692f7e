"""Units and ways to sum their gradients, at random, and the best choice by trying everything."""

import itertools
import random

from hybridrl.parallel.reduction_choice import (
    FULL,
    IN_ORDER,
    NOTHING,
    ON_A_STREAM,
    Bucket,
    Curve,
    Overlap,
    Part,
    Way,
    seconds_of,
)

OVERLAPS = [IN_ORDER, ON_A_STREAM, Overlap(beside=True), Overlap(beside=True, contention=0.3)]


def way(name, codec=0.0, link=1e6, alpha=0.0):
    """`codec` seconds for a million values, `link` values a second."""
    costs = NOTHING if not codec else Curve.of(alpha, 1e6 / codec)
    return Way(name, (Part(1.0, costs, Curve.of(alpha, link)),))


def random_case(seed):
    dice = random.Random(seed)
    ready, buckets = 0.0, []
    for _ in range(dice.randint(1, 7)):
        ready += dice.uniform(0, 2)
        buckets.append(Bucket(int(10 ** dice.uniform(3, 7)), ready))
    ways = [way(FULL, link=10 ** dice.uniform(5, 7), alpha=dice.uniform(0, 0.1))]
    for name, smaller in (("int8", 4), ("int4", 7.5), ("top_k", 50)):
        link = smaller * 10 ** dice.uniform(5, 7)
        ways.append(way(name, dice.uniform(0, 1), link, dice.uniform(0, 0.1)))
    return buckets, ways[: dice.randint(2, 4)], OVERLAPS[seed % len(OVERLAPS)]


def least(buckets, ways, overlap):
    """By trying everything."""
    tried = itertools.product(ways, repeat=len(buckets))
    return min(seconds_of(buckets, chosen, overlap) for chosen in tried)
