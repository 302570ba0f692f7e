"""`passes_tests`: the share of a problem's tests that the program in a response passes.

Set `reward.function` to `hybridrl.rewards.code:passes_tests`.

The program runs in the sandbox, so it does no harm; see docs/sandbox.md. Nor can it cheat where the
verdict is made outside of its process: it is asked for data, and what is expected never reaches it.
So it is with tests of inputs and outputs, and with most asserts; see `splitting`.

Other asserts run in the same process as the program, after it. What it prints, ending early in any
way, replacing builtins, and results that claim to equal everything gain nothing there: a test
passes only if its end was reached, which is reported with a number drawn at random, and plain data
is compared with plain data only. What cannot be excluded in one process is a program that looks
through the interpreter for the test's own frame, for what it expects or for the number; one that
replaces functions that a test calls, such as `numpy.testing.assert_allclose`; and one that returns
an object with its own arithmetic to a test that calculates with it. How many tests are of this kind
is counted, and so is how many programs try such things.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import json
import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.rewards.cheating import cheating_attempts
from hybridrl.rewards.plain_data import read_observation
from hybridrl.rewards.sandbox import Limits, confinement, run_python
from hybridrl.rewards.splitting import split_tests

_WALL_FACTOR = 2.0  # on a busy machine, processor time takes so much longer
_NEEDED = ("collections", "datetime", "decimal", "fractions", "numpy")
_OUTPUT_KIB = 4096  # for what asserts observe
_CONFINED = Path(__file__).with_name("confined")
_FUTURE = "from __future__ import annotations\n"  # allowed at the beginning only
_JUDGE = _FUTURE + "\n".join(
    _CONFINED.joinpath(f"{name}.py").read_text().replace(_FUTURE, "")
    for name in ("plain", "comparing", "asserts")
)

_FENCE = r"^[ \t]*```[ \t]*%s[ \t]*\n(.*?)(?:^[ \t]*```|\Z)"
_MARKED = re.compile(_FENCE % r"(?:python3?|py)\b[^\n]*", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_UNMARKED = re.compile(_FENCE % "", re.DOTALL | re.MULTILINE)


def passes_tests(
    prompt: str,
    response: str,
    tests: Any,
    *,
    cpu_s: int = 10,
    memory_mib: int = 1024,
    total_s: float = 20.0,
    **row: Any,
) -> dict[str, float]:
    """The share of the tests that the response's program passes, from 0.0 to 1.0, as `score`.

    The program is the last block fenced as Python, else the last fenced block without a language,
    else the whole response. A test that does not end within the limits is not passed.

    Beside it: `inside`, the share of the tests in whose verdict the program's process had a say,
    and `cheating`, 1.0 if the program tries to get at its tests (`cheating_attempts`).

    Args:
        tests: a list of Python sources with asserts, each of which counts as one test; or of
            dictionaries with the keys `input` and `output`, what the program reads and must print
            (spaces at the ends of lines and empty lines at the end aside); or JSON of one of them.
        cpu_s: whole seconds of processor time, for all asserts together or for each input. A
            program that waits is ended after twice as many seconds.
        memory_mib: memory of the program in MiB.
        total_s: seconds for all inputs together, which must be less than `reward.timeout_s`.

    Raises:
        ValueError: see `read_tests`.
        MachineError: if this machine cannot confine programs.
    """
    tests = read_tests(tests)
    program = extract_program(response)
    limits = _limits(cpu_s, memory_mib, total_s)
    inside, applied = 0, set[str]()
    if all(isinstance(test, str) for test in tests):
        passed, inside = _passed_asserts(program, tests, limits)
        applied = _functions_in(tests)
    else:
        passed = _passed_inputs(program, [_as_pair(test) for test in tests], limits, total_s)
    return {
        "score": passed / len(tests),
        "inside": inside / len(tests),
        "cheating": float(cheating_attempts(program, applied) > 0),
    }


def check_reward(options: Mapping[str, Any], timeout_s: float) -> str:
    """Whether programs can be run here, and how they are confined; see `hybridrl.rewards`.

    Raises:
        ConfigError: if a limit among the options is no limit.
        MachineError: if this machine cannot confine programs.
    """
    limits = {"cpu_s": 10, "memory_mib": 1024, "total_s": 20.0, **options}
    for name, value in limits.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_whole = is_number and math.isfinite(value) and value == int(value)
        if not (is_number and 0 < value < math.inf and (is_whole or name == "total_s")):
            kind = "number of seconds" if name == "total_s" else "whole number"
            raise ConfigError(
                f"reward.options.passes_tests.{name}={value}: must be a {kind} greater than 0."
            )
    if "total_s" in options and not limits["total_s"] < timeout_s:
        raise ConfigError(
            f"reward.options.passes_tests.total_s={limits['total_s']:g}: reward.timeout_s is "
            f"{timeout_s:g}, which would end a response's tests first. "
            f"Set reward.timeout_s={limits['total_s'] * 1.5:g}, or a lower total_s."
        )
    return str(confinement())


def _limits(cpu_s: int, memory_mib: int, total_s: float) -> Limits:
    wall_s = min(_WALL_FACTOR * cpu_s, total_s)
    return Limits(wall_s=wall_s, cpu_s=cpu_s, memory_mib=memory_mib)


def extract_program(response: str) -> str:
    """The program in a response; see `passes_tests`. A fence that is not closed ends with it."""
    for pattern in (_MARKED, _UNMARKED):
        if blocks := pattern.findall(response):
            return str(blocks[-1])
    return response


def read_tests(tests: Any) -> Sequence[Any]:
    """Return the tests of a row as a list.

    Raises:
        ValueError: if they are something else, empty, no valid Python, or define asserts that
            nothing calls.
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
        _check_parses(tests)
        _check_called(tests)
    else:
        list(map(_as_pair, tests))
    return tests


def _passed_asserts(program: str, tests: Sequence[str], limits: Limits) -> tuple[int, int]:
    """How many tests are passed, and how many are not judged outside alone."""
    nonce = secrets.token_hex(16)
    names = f"observe_{secrets.token_hex(8)}", f"compare_{secrets.token_hex(8)}"
    split = split_tests(tests, *names)
    sources = [test.source for test in split]
    everything = "\n".join([program, *tests])
    needs = [name for name in _NEEDED if name in everything]
    call = f"judge({program!r}, {needs!r}, {sources!r}, {names!r}, {nonce.encode()!r})"
    limits = dataclasses.replace(limits, output_kib=_OUTPUT_KIB)
    outcome = run_python(f"{_JUDGE}\n{call}\n", limits=limits)
    observed: dict[int, dict[int, Any]] = {number: {} for number in range(len(tests))}
    ended = set()
    # Should the program have found the number, it may write what it likes here.
    for test, which, answer in re.findall(
        rf"^{nonce}:(\d{{1,6}}):(?:end|(\d{{1,6}}):(.*))$", outcome.stdout, re.MULTILINE
    ):
        if not which:
            ended.add(int(test))
        elif int(test) in observed:
            with contextlib.suppress(ValueError):  # then it is as if nothing had been returned
                observed[int(test)][int(which)] = read_observation(answer)
    verdicts = [test.passes(seen) for test, seen in zip(split, observed.values(), strict=True)]
    passed = sum(holds and i in ended for i, (holds, _) in enumerate(verdicts))
    return passed, sum(was_inside for _, was_inside in verdicts)


def _check_parses(tests: Sequence[str]) -> None:
    for test in tests:
        try:
            ast.parse(test)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"The test {_shown(test)} is no valid Python: {error}") from error


def _check_called(tests: Sequence[str]) -> None:
    """Refuses tests whose asserts nobody calls: every program would pass them."""
    trees = [ast.parse(test) for test in tests]
    named = {
        node.id if isinstance(node, ast.Name) else node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    }
    for test, tree in zip(tests, trees, strict=True):
        for statement in tree.body:
            if (
                isinstance(statement, ast.FunctionDef)
                and statement.name not in named
                and any(isinstance(node, ast.Assert) for node in ast.walk(statement))
            ):
                given = "<the program's function>" if statement.args.args else ""
                raise ValueError(
                    f"The test {_shown(test)} defines {statement.name}, which nothing calls, so it "
                    f"tests nothing. Add a line to it: {statement.name}({given})."
                )


def _functions_in(tests: Sequence[str]) -> set[str]:
    """Names of the built-in functions that tests apply to what calls return."""
    return {
        node.func.id
        for test in tests
        for node in ast.walk(ast.parse(test))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and hasattr(builtins, node.func.id)
        and any(isinstance(inner, ast.Call) for a in node.args for inner in ast.walk(a))
    }


def _passed_inputs(
    program: str, tests: Sequence[tuple[str, str]], limits: Limits, total_s: float
) -> int:
    begin, passed = time.monotonic(), 0
    for given, expected in tests:
        left = total_s - (time.monotonic() - begin)
        if left <= 0:
            break
        of_test = dataclasses.replace(limits, wall_s=min(left, limits.wall_s))
        outcome = run_python(program, given, limits=of_test)
        passed += outcome.ended == "ok" and _lines(outcome.stdout) == _lines(expected)
    return passed


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
