"""Rows of a linear or integer program as they are thought of, and HiGHS, which solves it."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array


class IntegerProgram:
    """A program that finds the variables, from 0 up, for which ``goal @ x`` is least.

    Args:
        goal: Of each variable.
        most: Of each variable.
        integral: Which of them are whole numbers.
    """

    def __init__(
        self, goal: NDArray[np.float64], most: NDArray[np.float64], integral: NDArray[np.bool_]
    ) -> None:
        self._goal, self._integral = goal, integral
        self.least, self.most = np.zeros(len(goal)), most
        self._where: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float64]] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def row(self, where: ArrayLike, values: ArrayLike, low: float, high: float) -> None:
        """Add the constraint ``low <= values @ x[where] <= high``."""
        places = np.asarray(where).ravel()
        self._where.append(places)
        self._values.append(np.broadcast_to(np.asarray(values, float), places.shape))
        self._low.append(low)
        self._high.append(high)

    def solve(
        self, *, below: float = np.inf, gap: float = 0.0, relaxed: bool = False
    ) -> tuple[float, NDArray[np.float64]] | None:
        """Return the least goal and its variables; None if there is no solution.

        Args:
            below: Only what is as low as this counts.
            gap: Share by which the goal may be above the least.
            relaxed: With fractions.
        """
        ends = np.cumsum([0, *map(len, self._where)])
        matrix = csr_array(
            (np.concatenate(self._values), np.concatenate(self._where), ends),
            shape=(len(ends) - 1, len(self._goal)),
        )
        # The solver knows what is 1 and what is 1e-7; seconds may be neither.
        scale = 1.0 / max(float(np.abs(self._goal).max()), 1e-30)
        constraints = [LinearConstraint(matrix, np.array(self._low), np.array(self._high))]
        if np.isfinite(below):
            constraints.append(LinearConstraint(self._goal * scale, -np.inf, below * scale))
        found = milp(
            self._goal * scale,
            integrality=None if relaxed else self._integral.astype(int),
            bounds=Bounds(self.least, self.most),
            constraints=constraints,
            options={"mip_rel_gap": gap},
        )
        return None if found.x is None else (float(found.fun) / scale, found.x)
