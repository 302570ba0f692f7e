"""Adding two numbers below 40: `17+38=` is answered by `55`."""

from __future__ import annotations

import numpy as np

from hybridrl.errors import ConfigError

CHARACTERS = "0123456789+="

_OPERANDS = 40  # 0 to 39, so there are 1,600 problems in all


def problems(
    count_held_out: int = 256, seed: int = 0
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All 1,600 problems, shuffled from `seed` and cut into `(train, held_out)`.

    No problem is in both parts; `a+b=` and `b+a=` count as two problems.

    Raises:
        ConfigError: if `count_held_out` leaves nothing to train on.
    """
    total = _OPERANDS**2
    if not 0 <= count_held_out < total:
        raise ConfigError(
            f"`eval.prompts` is {count_held_out}, but `arithmetic` has {total} problems and "
            f"at least one must be left for training: give a number from 0 to {total - 1}."
        )
    order = np.random.default_rng(seed).permutation(total).tolist()
    rows = [_problem(*divmod(number, _OPERANDS)) for number in order]
    return rows[count_held_out:], rows[:count_held_out]


def _problem(left: int, right: int) -> dict[str, str]:
    return {"prompt": f"{left}+{right}=", "answer": str(left + right)}
