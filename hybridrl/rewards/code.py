"""The reward function `passes_tests`: the share of a problem's tests that a response's program
passes.

Set `reward.function` to `hybridrl.rewards.code:passes_tests`. The program runs in the sandbox, so
it does no harm, and its tests in another process, so it changes none of them: see docs/sandbox.md.
Whatever a response holds, it can at most score 0.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.config.setting import Setting
from hybridrl.errors import ConfigError
from hybridrl.rewards.transient_score import TransientScore
from hybridrl.sandbox.checked_tests import check_test
from hybridrl.sandbox.python_runner import (
    SandboxLimits,
    find_confinement,
    judge_program,
    run_python,
)

_WALL_SECONDS_PER_CPU_SECOND = 2.0  # on a busy machine, processor time takes so much longer
_TOTAL_S = 20.0

_FENCE = r"^[ \t]*```[ \t]*%s\n(.*?)(?:^[ \t]*```|\Z)"
_PYTHON_BLOCK = re.compile(
    _FENCE % r"(?:python3?|py)\b[^\n]*", re.DOTALL | re.MULTILINE | re.IGNORECASE
)
_PLAIN_BLOCK = re.compile(_FENCE % "", re.DOTALL | re.MULTILINE)


def passes_tests(
    prompt: str,
    response: str,
    tests: Any,
    *,
    cpu_s: int = 10,
    memory_mib: int = 1024,
    total_s: float = _TOTAL_S,
    **row: Any,
) -> dict[str, float]:
    """Return the share of the tests that the response's program passes, from 0.0 to 1.0, as
    `score`.

    The program is the last block fenced as Python, else the last fenced block without a language,
    else the whole response. A test that does not end within the limits is not passed.

    Beside it: `vacuous`, the share of the tests in which something was compared with nothing, such
    as an empty array with a full one, which passes no test; and `slow_verdicts`, 1.0 if the tests
    themselves, with what the program returned, took longer than the limits and were stopped.

    Args:
        tests: a list of Python sources, each of which counts as one test: asserts, classes of
            `unittest`, functions and classes of pytest, or doctests; or of dictionaries with the
            keys `input` and `output`, what the program reads and must print (spaces at the ends of
            lines and empty lines at the end aside); or JSON of one of them.
        cpu_s: whole seconds of processor time of the program, and as many of its tests; or for each
            input. A program or a test that waits is ended after twice as many seconds.
        memory_mib: memory of the program in MiB.
        total_s: seconds for all tests together, which must be less than `reward.timeout_s`.

    Raises:
        ValueError: see `read_tests`.
        UnsupportedMachineError: if this machine cannot confine programs.
    """
    tests = read_tests(tests)
    program = extract_program(response)
    wall_s = min(_WALL_SECONDS_PER_CPU_SECOND * cpu_s, total_s)
    limits = SandboxLimits(wall_s=wall_s, cpu_s=cpu_s, memory_mib=memory_mib)
    if not all(isinstance(test, str) for test in tests):
        read = [_read_input_test(test) for test in tests]
        passed, is_repeatable = run_inputs(program, read, limits, total_s)
        found = {"score": passed / len(tests)}
    else:
        verdict = judge_program(program, tests, limits)
        found = {
            "score": sum(verdict.passed) / len(tests),
            "vacuous": sum(verdict.vacuous) / len(tests),
            "slow_verdicts": float(verdict.is_slow),
        }
        is_repeatable = verdict.is_repeatable
    # Without namespaces others' threads and files leave a program less room.
    is_alone = find_confinement().namespaces != "none" or found["score"] == 1.0
    return found if is_repeatable and is_alone else TransientScore(found)


def _list_verdict_inputs(response: str, tests: Any, **row: Any) -> list[Any]:
    """Return what a verdict depends on: the program without the text around it, the tests and the
    limits, and none of the row's other columns."""
    limits = [row.get(name) for name in ("cpu_s", "memory_mib", "total_s")]
    return [extract_program(response), tests, limits, str(find_confinement())]


passes_tests.cache = _list_verdict_inputs  # type: ignore[attr-defined]


def check_reward(
    options: Mapping[str, Any], timeout_s: float, group: Setting = Setting("reward")
) -> str:
    """Check that this machine can confine programs, and return how; see `hybridrl.rewards`.

    Raises:
        ConfigError: if a limit among the options is no limit.
        UnsupportedMachineError: if this machine cannot confine programs.
    """
    limits = {"cpu_s": 10, "memory_mib": 1024, "total_s": _TOTAL_S, **options}
    for name, value in limits.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_whole = is_number and math.isfinite(value) and value == int(value)
        if not (is_number and 0 < value < math.inf and (is_whole or name == "total_s")):
            kind = "number of seconds" if name == "total_s" else "whole number"
            raise ConfigError(
                f"{group}.options.passes_tests.{name}={value}: must be a {kind} greater than 0."
            )
    if not limits["total_s"] < timeout_s:
        raise ConfigError(
            f"{group}.options.passes_tests.total_s={limits['total_s']:g}: {group}.timeout_s is "
            f"{timeout_s:g}, which would end a response's tests first. Set "
            f"{group}.timeout_s={limits['total_s'] * 1.5:g}, or a lower total_s."
        )
    return str(find_confinement())


def extract_program(response: str) -> str:
    """Return the program in a response (see `passes_tests`); a fence that is not closed ends with
    the response."""
    for pattern in (_PYTHON_BLOCK, _PLAIN_BLOCK):
        if blocks := pattern.findall(response):
            return str(blocks[-1])
    return response


def read_tests(tests: Any) -> Sequence[Any]:
    """Return the tests of a row as a list.

    Raises:
        ValueError: if they are something else or empty, or if one of them cannot be run or defines
            asserts that nothing calls.
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"`tests` is a text but no JSON ({error}); give a list, or a list as JSON."
            ) from error
    if not isinstance(tests, Sequence) or len(tests) == 0:
        raise ValueError(
            f"`tests` is {_shown(tests)}, expected a list with at least one test: an assert, or a "
            "dictionary with `input` and `output`."
        )
    if all(isinstance(test, str) for test in tests):
        for test in tests:
            _check_runs(test)
    else:
        list(map(_read_input_test, tests))
    return tests


def _check_runs(test: str) -> None:
    """Refuses a test that is no Python and no doctest, one that needs pytest where there is none,
    and one whose asserts nobody calls.

    Raises:
        ValueError: says which.
    """
    try:
        checked = check_test(test)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"The test {_shown(test)} is no valid Python: {error}") from error
    if "pytest" in checked.names and importlib.util.find_spec("pytest") is None:
        raise ValueError(f"The test {_shown(test)} needs pytest. Install it: pip install pytest.")
    if checked.uncalled:
        raise ValueError(
            f"The test {_shown(test)} defines {checked.uncalled.partition('(')[0]}, which nothing "
            f"calls, so it tests nothing. Add a line to it: {checked.uncalled}."
        )


def run_inputs(
    program: str, tests: Sequence[tuple[str, str]], limits: SandboxLimits, total_s: float
) -> tuple[int, bool]:
    """Return how many tests a program passes, and whether it would do so on a slower machine."""
    begin, passed, is_repeatable = time.monotonic(), 0, True
    for given, expected in tests:
        left = total_s - (time.monotonic() - begin)
        if left <= 0:
            return passed, False
        of_test = dataclasses.replace(limits, wall_s=min(left, limits.wall_s))
        outcome = run_python(program, given, limits=of_test)
        is_repeatable &= outcome.is_repeatable(of_test)
        passed += outcome.ended == "ok" and _normalized_lines(outcome.stdout) == _normalized_lines(
            expected
        )
    return passed, is_repeatable


def _read_input_test(test: Any) -> tuple[str, str]:
    if isinstance(test, dict):
        given, expected = test.get("input"), test.get("output")
        if isinstance(given, str) and isinstance(expected, str):
            return given, expected
    raise ValueError(
        f"`tests` holds {_shown(test)}, expected only asserts, or only dictionaries with texts "
        "under `input` and `output`."
    )


def _normalized_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
