"""The reward function `math`, which compares expressions by their mathematical value."""

from __future__ import annotations

import importlib.util
import logging
import threading
from functools import lru_cache
from typing import Any

from hybridrl.errors import MissingPackageError, pip_install

logging.getLogger("math_verify").setLevel(logging.ERROR)  # its warnings quote whole responses
_DELIMITERS = ("$", "\\(", "\\[", "\\boxed")


def math(prompt: str, response: str, answer: str, *, timeout_s: int = 5, **row: Any) -> float:
    r"""The last expression of the response equals the answer: `\frac{1}{2}` and `0.5`, `x+1` and
    `1+x`, sets in any order.

    Judged by the package math-verify, which looks into the last `\boxed{...}` first, then for
    LaTeX between delimiters, then for plain numbers and expressions.

    Args:
        timeout_s: Whole seconds for reading the response, and again for comparing it. A response
            that takes longer is wrong.

    Raises:
        MissingPackageError: if math-verify is not installed.
        ValueError: if the answer cannot be read.
    """
    check_math_verify_installed()
    from math_verify import parse, verify

    # Its time-outs are alarm signals, which only the main thread gets. A reward process calls
    # functions there, and ends what still hangs after `reward.timeout_s`.
    limit = timeout_s if threading.current_thread() is threading.main_thread() else None
    expected = _parse_reference_answer(answer, limit)
    if not expected:
        raise ValueError(f"math-verify finds nothing to compare with in the answer {answer!r}.")
    found = parse(response, parsing_timeout=limit)
    return float(verify(list(expected), found, timeout_seconds=limit))


def check_math_verify_installed() -> None:
    """Raise a `MissingPackageError` if math-verify is not installed; nothing is imported."""
    if importlib.util.find_spec("math_verify") is None:
        raise MissingPackageError(
            "The reward function `math` needs the package math-verify: "
            f"{pip_install('math-verify')}"
        )


@lru_cache(maxsize=4096)  # the samples of a prompt share their answer
def _parse_reference_answer(answer: str, limit: int | None) -> tuple[Any, ...]:
    from math_verify import parse

    if not any(delimiter in answer for delimiter in _DELIMITERS):
        # Else a number would be picked out of undelimited LaTeX, the 2 of \frac{1}{2}.
        answer = f"\\boxed{{{answer.rpartition('####')[2].strip()}}}"
    return tuple(parse(answer, parsing_timeout=limit))
