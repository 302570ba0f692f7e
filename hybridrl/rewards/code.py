"""`passes_tests`: the share of a problem's tests that the program in a response passes.

Set `reward.function` to `hybridrl.rewards.code:passes_tests`.

The program runs in the sandbox, so it does no harm; whether it also cannot cheat is another
question. With tests of inputs and outputs it cannot: what is expected never reaches its process.

Asserts run in the same process as the program, after it. What the program prints, ending early in
any way, replacing builtins, and results that claim to equal everything gain nothing: a test passes
only if its last line was reached, which is reported with a number drawn at random, and asserts
compare plain data with plain data. (So an object with its own `__eq__` that is compared with a
number, a text or a list does not pass, if rightly or not.) What cannot be excluded in one process
is a program that looks through the interpreter for the test's own frame, for what it expects or for
the number; one that replaces functions that a test calls, such as `math.isclose`; and one that
returns an object with its own arithmetic to a test that calculates with it. Use inputs and outputs
where a policy learns to do such things.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridrl.rewards.sandbox import Limits, run_python

_TOTAL_S = 20.0  # for all tests of a response: less than `reward.timeout_s` unless that is changed
_LIMITS = Limits(wall_s=10.0, cpu_s=10)
_JUDGE = Path(__file__).with_name("confined").joinpath("asserts.py").read_text()

_FENCE = r"^[ \t]*```[ \t]*%s[ \t]*\n(.*?)(?:^[ \t]*```|\Z)"
_MARKED = re.compile(_FENCE % r"(?:python3?|py)\b[^\n]*", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_UNMARKED = re.compile(_FENCE % "", re.DOTALL | re.MULTILINE)

_OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
    ast.NotIn: "not in",
}


def passes_tests(prompt: str, response: str, tests: Any, **row: Any) -> float:
    """The share of the tests that the response's program passes, from 0.0 to 1.0.

    The program is the last block fenced as Python, else the last fenced block without a language,
    else the whole response. A test that does not end within the time limits is not passed: 10
    seconds for all asserts together, or for each input, and 20 seconds for all inputs.

    Args:
        tests: a list of Python sources with asserts, each of which counts as one test; or of
            dictionaries with the keys `input` and `output`, what the program reads and must print
            (spaces at the ends of lines and empty lines at the end aside); or JSON of one of them.

    Raises:
        ValueError: if `tests` is something else, empty, or no valid Python.
        RewardError: if this machine cannot confine programs.
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
    program = extract_program(response)
    if all(isinstance(test, str) for test in tests):
        passed = _passed_asserts(program, tests)
    else:
        passed = _passed_inputs(program, [_as_pair(test) for test in tests])
    return passed / len(tests)


def extract_program(response: str) -> str:
    """The program in a response; see `passes_tests`. A fence that is not closed ends with it."""
    for pattern in (_MARKED, _UNMARKED):
        if blocks := pattern.findall(response):
            return str(blocks[-1])
    return response


def _passed_asserts(program: str, tests: Sequence[str]) -> int:
    nonce, compare = secrets.token_hex(16), f"compare_{secrets.token_hex(8)}"
    prepared = [_prepare(test, compare) for test in tests]
    everything = "\n".join([program, *tests])
    needs = [name for name in ("collections", "fractions") if name in everything]
    call = f"judge({program!r}, {needs!r}, {prepared!r}, {compare!r}, {nonce.encode()!r})"
    outcome = run_python(f"{_JUDGE}\n{call}\n", limits=_LIMITS)
    reported = set(re.findall(rf"^{nonce}:(\d+)$", outcome.stdout, re.MULTILINE))
    return sum(str(i) in reported for i in range(len(tests)))


def _passed_inputs(program: str, tests: Sequence[tuple[str, str]]) -> int:
    begin, passed = time.monotonic(), 0
    for given, expected in tests:
        left = _TOTAL_S - (time.monotonic() - begin)
        if left <= 0:
            break
        limits = dataclasses.replace(_LIMITS, wall_s=min(left, _LIMITS.wall_s))
        outcome = run_python(program, given, limits=limits)
        passed += outcome.ended == "ok" and _lines(outcome.stdout) == _lines(expected)
    return passed


def _prepare(test: str, compare: str) -> str:
    """The test with its asserts' comparisons made by the function `compare`."""
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"The test {_shown(test)} is no valid Python: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            node.test = _Comparisons(compare).visit(node.test)
    return ast.unparse(ast.fix_missing_locations(tree))


class _Comparisons(ast.NodeTransformer):
    """Writes `a < b == c` as `compare(("<", "=="), (a, b, c))`."""

    def __init__(self, compare: str) -> None:
        self._compare = compare

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if any(type(operator) not in _OPERATORS for operator in node.ops):
            return node  # `is` cannot be lied to
        names = [ast.Constant(_OPERATORS[type(operator)]) for operator in node.ops]
        operands = [node.left, *node.comparators]
        groups: list[ast.expr] = [ast.Tuple(list(group), ast.Load()) for group in (names, operands)]
        return ast.Call(ast.Name(self._compare, ast.Load()), groups, [])


def _as_pair(test: Any) -> tuple[str, str]:
    if isinstance(test, dict):
        given, expected = test.get("input"), test.get("output")
        if isinstance(given, str) and isinstance(expected, str):
            return given, expected
    raise ValueError(
        f"`tests` holds {_shown(test)}, expected only asserts, or only dictionaries with texts "
        "under `input` and `output`."
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
