"""Units and ways to sum their gradients, at random, and the best choice by trying everything."""

import itertools
import random

from hybridrl.parallel.reduction_choice import (
    FULL_REDUCTION,
    ZERO_COST,
    CostCurve,
    GradientBucket,
    HopCost,
    MethodCost,
    predict_backward_seconds,
)


def line(alpha, rate):
    """`alpha` seconds plus one for each `rate` values."""
    return CostCurve(((0.0, alpha), (1.0, alpha + 1 / rate)))


def way(name, codec=0.0, link=1e6, alpha=0.0):
    """`codec` seconds for a million values, `link` values a second."""
    costs = ZERO_COST if not codec else line(alpha, 1e6 / codec)
    return MethodCost(name, (HopCost(1.0, costs, line(alpha, link)),))


def random_case(seed):
    dice = random.Random(seed)
    ready, buckets = 0.0, []
    for _ in range(dice.randint(1, 7)):
        ready += dice.uniform(0, 2)
        buckets.append(GradientBucket(int(10 ** dice.uniform(3, 7)), ready))
    ways = [way(FULL_REDUCTION, link=10 ** dice.uniform(5, 7), alpha=dice.uniform(0, 0.1))]
    for name, smaller in (("int8", 4), ("int4", 7.5), ("top_k", 50)):
        link = smaller * 10 ** dice.uniform(5, 7)
        ways.append(way(name, dice.uniform(0, 1), link, dice.uniform(0, 0.1)))
    return buckets, ways[: dice.randint(2, 4)], bool(seed % 2)


def least(buckets, ways, beside):
    """By trying everything."""
    tried = itertools.product(ways, repeat=len(buckets))
    return min(predict_backward_seconds(buckets, chosen, beside) for chosen in tried)
