"""The variance of means over neighbouring steps, which resemble each other in a run."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

EDGE = 3
"""Steps at either end of a series that no jump is looked for in."""
MOST_ALIKE = 0.97
"""Largest correlation of neighbouring steps that is reckoned with."""


def variance_of_sums(values: npt.NDArray[np.float64]) -> float:
    """Return the variance of a sum of many neighbouring steps, per step: that of steps around their
    trend, times (1 + r) / (1 - r), where r is the correlation of neighbours.

    The trend is a parabola and one jump, for a run may change at once.
    """
    count = len(values)
    basis, jumps = _shapes(count)
    rest = values - basis @ (basis.T @ values)
    if jumps.size:
        sizes = jumps.T @ rest
        best = int(np.abs(sizes).argmax())
        rest = rest - jumps[:, best] * sizes[best]
    squares = float(rest @ rest)
    if squares < 1e-18:
        return 0.0
    # A fit hides how alike steps are: by simulation about (6 + 12 r) / count.
    r = (float(rest[1:] @ rest[:-1]) / squares * count + 6) / max(1, count - 12)
    r = min(max(r, 0.0), MOST_ALIKE)
    return squares / max(1, count - 5) * (1 + r) / (1 - r)


@lru_cache(maxsize=8)
def _shapes(count: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return orthonormal parabolas, `[count, 3]`, and what a jump at each place adds to them, of
    length 1."""
    basis = np.linalg.qr(np.vander(np.linspace(-1, 1, count), 3))[0]
    jumps = np.tri(count)[:, EDGE : max(EDGE, count - EDGE)]
    jumps = jumps - basis @ (basis.T @ jumps)
    return basis, jumps / np.linalg.norm(jumps, axis=0)
