"""A multiplier that learns the weight of a constraint."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from torch import Tensor

from hybridrl.errors import ConfigError

_SMOOTHED_UPDATES = 4
"""Updates over whose costs the violation is averaged."""


class LagrangeMultiplier:
    """The weight of a cost whose mean is to stay below a limit.

    It rises while the mean cost is above the limit and falls while it is below: gradient ascent of
    value * (mean - limit) in the logarithm of the value, so that it stays positive. Dai 2023,
    arXiv:2310.12773, equation 31. Three things keep it from running away:

    * The violation is (mean - limit) / root mean square of (cost - limit), both over the costs of
      the last updates: a number from -1 to 1, whatever the unit of the cost.
    * The step, rate * violation * min(value, 1), does not grow with a value above 1.
    * The value is never more than `most`, and comes down from there at the first step.

    Attributes:
        value: The weight now.
    """

    def __init__(self, initial: float, limit: float, rate: float, most: float = 10.0) -> None:
        if not 0 < initial <= most:
            raise ConfigError(
                f"The first `multiplier` is {initial}; expected a positive number, at most {most}."
            )
        self.value = initial
        self.limit = limit
        self.rate = rate
        self.most = most
        self._violations: deque[float] = deque(maxlen=_SMOOTHED_UPDATES)
        self._squares: deque[float] = deque(maxlen=_SMOOTHED_UPDATES)

    def update(self, costs: Tensor) -> None:
        """Take one step of gradient ascent with the costs of a step.

        Args:
            costs: Of the samples of a step, `[samples]`; NaN where a sample was dropped. Without
                any other the multiplier stays as it is.
        """
        over = (costs.double() - self.limit)[torch.isfinite(costs)]
        if not len(over):
            return
        self._violations.append(float(over.mean()))
        self._squares.append(float(over.square().mean()))
        scale = math.sqrt(sum(self._squares) * len(self._squares))
        violation = sum(self._violations) / scale if scale else 0.0
        step = self.rate * violation * min(self.value, 1.0)
        self.value = min(self.value * math.exp(step), self.most)

    def state(self) -> dict[str, Any]:
        """Return what a resumed job needs to continue, as plain numbers."""
        return {
            "value": self.value,
            "violations": list(self._violations),
            "squares": list(self._squares),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.value = min(state["value"], self.most)
        self._violations = deque(state["violations"], maxlen=_SMOOTHED_UPDATES)
        self._squares = deque(state["squares"], maxlen=_SMOOTHED_UPDATES)
