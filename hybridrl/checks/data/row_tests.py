"""Rows whose tests say nothing of a program, found while the data is read.

The empty program is the one answer that is known to be wrong. Tests that it passes would pay for
any text; tests that import what is not installed would pay for none.
"""

from __future__ import annotations

import ast
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.checks.data.reward_data_checks import resolve_scored_sources
from hybridrl.config.schema import Config, DataConfig, RewardConfig
from hybridrl.data.mixture import parse_sources
from hybridrl.errors import RowError
from hybridrl.evaluation.eval_sets import resolve_eval_sets
from hybridrl.rewards.code import read_tests
from hybridrl.rewards.loading import parse_function_list
from hybridrl.sandbox.confined.judge import MODULES
from hybridrl.sandbox.python_runner import UNCHECKED, judge_program
from hybridrl.trainers import load_roles

if TYPE_CHECKING:
    import pyarrow as pa

    from hybridrl.data.refused_rows import RefusedRows
    from hybridrl.data.row_origin import DataRow

TESTED = "hybridrl.rewards.code:passes_tests"
"""The function that reads the column `tests`."""
LONGEST_S = 60.0
"""For the tests of all rows of a file; the rows after that are not tried."""
MOST_THREADS = 8
_SHOWN = 160
_log = logging.getLogger(__name__)


def check_tests(
    config: Config, progress: Callable[[str], None] = lambda _: None
) -> Callable[[DataConfig, pa.Table, RefusedRows], None]:
    """Return what refuses such rows of a table; see `refused_rows.collected`.

    Args:
        progress: Told what goes on, for a person to read.
    """
    scores = any(spec.worker == "reward" for spec in load_roles(config).values())

    def check(data: DataConfig, rows: pa.Table, refused: RefusedRows) -> None:
        settings = _scoring(config, data) if scores and "tests" in rows.column_names else None
        if settings is None:
            return
        read = refused.map(_reader(settings, refused.place), rows.column("tests").to_pylist())
        tests = {number: found for number, found in enumerate(read, 1) if found}
        for number, shown in _proving_nothing(tests, progress).items():
            refused.refuse(
                number,
                RowError(
                    f"{refused.row(number)} ({refused.place}): the test {shown[:_SHOWN]} proves "
                    "nothing: an empty program passes it, or it compares nothing. Mend it (does it "
                    "assert anything, and does something call it?) or leave the row out.",
                    "whose tests prove nothing",
                ),
            )

    return check


def _scoring(config: Config, data: DataConfig) -> RewardConfig | None:
    """Return the reward settings of the rows that come from there, if tests are run for them."""
    by_source, sources = resolve_scored_sources(config, "reward"), parse_sources(config.data)
    named = [s.name if s.name in by_source else None for s in sources if s.data == data]
    found = [by_source[name] for name in (named if sources else [None])]
    found += [one.reward for one in resolve_eval_sets(config).values() if one.data == data]
    return next((one for one in found if TESTED in parse_function_list(one.function)), None)


def _reader(settings: RewardConfig, place: str) -> Callable[[DataRow, Any], Sequence[Any] | None]:
    """Return a function that reads the tests of a row; it returns None for those that
    `reward.on_error` is to deal with."""

    def read(row: DataRow, tests: Any) -> Sequence[Any] | None:
        try:
            found = read_tests(tests)
        except ValueError as error:
            if settings.on_error != "fail":
                return None
            raise RowError(
                f"{row} ({place}): {error} Mend the tests or leave the row out.",
                "whose tests cannot be read",
            ) from error
        sources = [test for test in found if isinstance(test, str)]
        if lacking := sorted({name for test in sources for name in _missing(test)}):
            named = ", ".join(f"`{name}`" for name in lacking)
            raise RowError(
                f"{row} ({place}): its tests import {named}, which the sandbox does not find, so "
                f"no program could pass them. Install what {named} comes from on every node, or "
                "leave the row out.",
                f"whose tests import {', '.join(lacking)}",
            )
        return found

    return read


def _missing(test: Any) -> list[str]:
    """List the modules that a test needs and that the sandbox does not find."""
    tops = {name.partition(".")[0] for name in _imports(ast.parse(test))}
    packages = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    return [
        name
        for name in tops - sys.stdlib_module_names - set(MODULES)
        if PathFinder.find_spec(name, packages) is None
    ]


def _imports(node: ast.AST) -> Iterator[str]:
    """Yield the modules imported below, but for those that a `try` may do without."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
    elif not isinstance(node, ast.Try):
        for inner in ast.iter_child_nodes(node):
            yield from _imports(inner)


def _proving_nothing(
    rows: Mapping[int, Sequence[Any]], progress: Callable[[str], None]
) -> dict[int, str]:
    """Return the tests that an empty program passes, or that check nothing, by row."""
    found = {}
    asserts = {number: tests for number, tests in rows.items() if isinstance(tests[0], str)}
    for number in rows.keys() - asserts.keys():  # what prints nothing needs no process
        if silent := [pair for pair in rows[number] if not pair["output"].strip()]:
            found[number] = repr(silent[0])
    begin, numbers, told = time.monotonic(), list(asserts), 0.0
    count = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(count) as threads:
        for start in range(0, len(numbers), count):
            took = time.monotonic() - begin
            if took > LONGEST_S:
                _log.warning(
                    "The tests of %d of %d rows were tried on an empty program, which took %.0f s; "
                    "those of the others were not.",
                    *(start, len(numbers), took),
                )
                break
            if took - told > 5:
                told = took
                progress(f"trying tests on an empty program: {start} of {len(numbers)} rows")
            chunk = numbers[start : start + count]
            verdicts = threads.map(lambda number: judge_program("", asserts[number]), chunk)
            for number, verdict in zip(chunk, verdicts, strict=True):
                of_tests = zip(asserts[number], verdict.passed, verdict.reasons, strict=True)
                empty = [test for test, passed, why in of_tests if passed or why == UNCHECKED]
                if empty:
                    found[number] = repr(empty[0])
    return found
