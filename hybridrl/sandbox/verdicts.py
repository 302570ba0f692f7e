"""Verdicts on programs: a program runs in one confined process, its tests whole in another."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridrl.rewards.checked_tests import check_test
from hybridrl.sandbox.python_runner import Limits, run_tests

UNCHECKED = "nothing was checked"
"""Why a test is not passed that compared nothing; `confined.judge` says so."""
_OUTPUT_KIB = 1 << 14  # of the judge's lines


@dataclass(frozen=True)
class Verdict:
    """What came of a program's tests.

    Attributes:
        passed: of each test, in order.
        reasons: why each test was not passed, empty for one that was.
        vacuous: of each test, whether a comparison in it would have held of anything.
        is_slow: whether the tests, not the program, took longer than the limits allow, so that they
            were stopped; those that were not reached are not passed.
    """

    passed: list[bool]
    reasons: list[str]
    vacuous: list[bool] = field(default_factory=list)
    is_slow: bool = False


def judge_program(program: str, tests: Sequence[str], limits: Limits | None = None) -> Verdict:
    """Runs tests of a program; whatever the program does, it can at most fail them.

    Args:
        program: Python. The empty program is the one that no sound test passes.
        tests: sources with asserts, classes of `unittest`, tests of pytest, or doctests.
        limits: of the program, and of the tests.

    Raises:
        SyntaxError, ValueError: if a test is neither Python nor a doctest.
        MachineError: if this machine cannot confine programs.
        RewardError: if the sandbox itself was killed.
    """
    limits = dataclasses.replace(limits or Limits(), output_kib=_OUTPUT_KIB)
    outcome = run_tests(program, [check_test(test) for test in tests], limits=limits)
    passed, vacuous = [False] * len(tests), [False] * len(tests)
    reasons = ["it was stopped before its end"] * len(tests)
    for line in outcome.stdout.splitlines():
        number, has_passed, found, reason = json.loads(line)
        passed[number], vacuous[number], reasons[number] = has_passed, found > 0, reason
    is_stopped = outcome.ended in ("wall_time", "cpu_time")
    is_slow = is_stopped and outcome.cpu_s >= outcome.program_cpu_s
    return Verdict(passed, reasons, vacuous, is_slow)
