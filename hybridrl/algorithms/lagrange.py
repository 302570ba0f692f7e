"""A multiplier that learns how much a constraint costs."""

from __future__ import annotations

import math

from hybridrl.errors import ConfigError


class LagrangeMultiplier:
    """The weight of a cost whose mean is to stay below a limit.

    It rises while the mean cost is above the limit and falls while it is below: gradient ascent of
    value * (mean - limit) in the logarithm of the value, so that it stays positive. Dai 2023,
    arXiv:2310.12773, equation 31.

    Attributes:
        value: The weight now.
    """

    def __init__(self, initial: float, limit: float, rate: float) -> None:
        if initial <= 0:
            raise ConfigError(f"The first `multiplier` is {initial}; expected a positive number.")
        self.value = initial
        self.limit = limit
        self.rate = rate

    def update(self, mean_cost: float) -> None:
        """Takes one step for a batch of this mean cost; NaN, of a batch without costs, takes none.

        A single step moves the logarithm by 1 at most, so that one strange batch cannot decide.
        """
        step = self.rate * self.value * (mean_cost - self.limit)
        if not math.isnan(step):
            self.value *= math.exp(min(max(step, -1.0), 1.0))
