"""Cutting tests in two: what runs in the program's process, and the verdict, which is made outside.

Of `assert sorted(f([3, 1])) == [1, 3]`, the process of the program is asked for `f([3, 1])` and
returns data; `sorted`, the comparison and `[1, 3]` stay outside, so that nothing that the program
does to its own process can pass the test, and nothing in there tells what is expected. So it is
with variables that hold what is expected, with loops over literals, and with functions
`check(candidate)` that are called with a function of the program.

What cannot be cut by its syntax alone, such as an assert in an `if`, or one that hands what is
expected to a function, runs in the program's process as a whole; see `confined/comparing.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.rewards.bound_names import bound, brought_along
from hybridrl.rewards.cutting import COMPARED_INSIDE, CannotCutError, ExpressionCutter
from hybridrl.rewards.unrolling import written_out
from hybridrl.rewards.verdict_functions import FUNCTIONS
from hybridrl.rewards.verdicts import COMPARISONS, Evaluation

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class SplitTest:
    """A test, cut in two.

    Attributes:
        source: what runs in the program's process.
        verdicts: expressions that must all be true, each with the values of the names in it.
        is_inside: whether the program's process has a say in the verdict.
    """

    source: str
    verdicts: Sequence[tuple[ast.expr, Mapping[str, Any]]]
    is_inside: bool

    def passes(self, observed: Mapping[int, Any]) -> tuple[bool, bool]:
        """Whether the test is passed, of which the end was reached, and whether the program's
        process has decided any of it.

        Args:
            observed: what was observed, by number; see `verdicts.Evaluation`.
        """
        was_inside = self.is_inside
        for verdict, names in self.verdicts:
            evaluation = Evaluation(names, observed)
            try:
                holds = bool(evaluation.value(verdict))
            except Exception:  # as an assert that raises
                holds = False
            was_inside = was_inside or evaluation.was_inside
            if not holds:
                return False, was_inside
        return True, was_inside


def split_tests(tests: Sequence[str], observe: str, compare: str) -> list[SplitTest]:
    """Cuts the tests of one program, which run one after the other in the same names.

    Args:
        tests: Python sources.
        observe, compare: names, for use in the sources, of the functions by which the program's
            process answers and compares; see `confined/asserts.py`.

    Raises:
        SyntaxError, ValueError: if a test is no valid Python.
    """
    handed_over: set[tuple[int, str]] = set()
    while True:
        statements = [list(written_out(ast.parse(test).body)) for test in tests]
        splitter = _Splitter([s for test in statements for s in test], observe, compare)
        splitter.handed_over = handed_over
        split = [splitter.split(test) for test in statements]
        # Which variables the program's process needs shows when all is cut.
        needed = set(_needed([test.source for test in split], splitter.left_out))
        if not needed:
            return split
        handed_over |= needed


def _needed(
    sources: Sequence[str], left_out: Collection[tuple[int, str]]
) -> Iterator[tuple[int, str]]:
    """Variables, with the number of the test that set them, that were left out of the sources and
    occur in them."""
    for number, source in enumerate(sources):
        for name in {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}:
            if found := [test for test, out in left_out if out == name and test <= number]:
                yield max(found), name


@dataclass
class _Parts:
    """What becomes of one test."""

    source: list[ast.stmt] = field(default_factory=list)
    verdicts: list[tuple[ast.expr, Mapping[str, Any]]] = field(default_factory=list)
    is_inside: bool = False
    observed: int = 0


class _Splitter:
    def __init__(self, statements: Sequence[ast.stmt], observe: str, compare: str) -> None:
        self._compare = compare
        self._known: dict[str, Any] = {}  # values of variables
        names = brought_along(statements), bound(statements)
        self._expressions = ExpressionCutter(self._known, *names, observe)
        self._parts = _Parts()
        self._number = -1  # of the test
        # Variables that the program's process needs, and those that it does not get, by tests.
        self.handed_over: set[tuple[int, str]] = set()
        self.left_out: set[tuple[int, str]] = set()

    def split(self, statements: Sequence[ast.stmt]) -> SplitTest:
        """Cuts a test. Those before it have run before it."""
        parts = self._parts = _Parts()
        self._number += 1
        for statement in statements:
            if isinstance(statement, ast.Assert):
                self._assert(statement)
            elif isinstance(statement, ast.ImportFrom):
                self._keep(statement)
                self._learn_imports(statement)
            elif isinstance(statement, ast.Assign) and self._learn(statement):
                (target,) = statement.targets
                if isinstance(target, ast.Name) and self._is_handed_over(target.id):
                    parts.source.append(statement)
            else:
                self._keep(statement)
        says = parts.verdicts or parts.is_inside
        source = ast.unparse(ast.fix_missing_locations(ast.Module(parts.source, [])))
        return SplitTest(source, parts.verdicts, parts.is_inside or not says)

    def _learn(self, statement: ast.Assign) -> bool:
        """Takes note of a variable whose value is known; False if it is not."""
        (target, *more) = statement.targets
        if more or not isinstance(target, ast.Name):
            return False
        is_handed_over = self._is_handed_over(target.id)
        try:
            value = Evaluation(self._known, {}).value(statement.value)
        except Exception:  # it is up to the program
            return False
        if callable(value) or (is_handed_over and not _is_immutable(value)):
            return False  # the program may change it
        self._known[target.id] = value
        if not is_handed_over:
            self.left_out.add((self._number, target.id))
        return True

    def _is_handed_over(self, name: str) -> bool:
        return (self._number, name) in self.handed_over

    def _learn_imports(self, statement: ast.ImportFrom) -> None:
        for alias in statement.names:
            name = f"{statement.module}.{alias.name}"
            if name in FUNCTIONS:
                self._known[alias.asname or alias.name] = FUNCTIONS[name]

    def _keep(self, statement: ast.stmt) -> None:
        """A statement that runs in the program's process."""
        for name in bound([statement]):
            self._known.pop(name, None)
        nodes = list(ast.walk(statement))
        asserts = [node for node in nodes if isinstance(node, ast.Assert)]
        for node in asserts:
            self._compare_inside(node)
        compares = any(isinstance(node, ast.Compare) for node in nodes)
        defines = any(isinstance(node, ast.FunctionDef | ast.Lambda) for node in nodes)
        if asserts or (compares and defines):
            self._parts.is_inside = True
        self._parts.source.append(statement)

    def _assert(self, statement: ast.Assert) -> None:
        parts = self._parts
        try:
            verdict, asked, tells = self._expressions.cut(statement.test, parts.observed)
        except CannotCutError:
            self._compare_inside(statement)
            parts.is_inside = True
            parts.source.append(statement)
            return
        parts.source += asked
        parts.observed += len(asked)
        parts.is_inside |= tells
        parts.verdicts.append((verdict, dict(self._known)))

    def _compare_inside(self, statement: ast.Assert) -> None:
        statement.test = _ComparisonsInside(self._compare).visit(statement.test)


def _is_immutable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_immutable, value))
    return isinstance(value, _IMMUTABLE)


class _ComparisonsInside(ast.NodeTransformer):
    """Writes `a < b == c` as `compare(("<", "=="), (a, b, c))`."""

    def __init__(self, compare: str) -> None:
        self._compare = compare

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        operators = [COMPARISONS[type(op)] for op in node.ops]
        if any(operator not in COMPARED_INSIDE for operator in operators):
            return node  # `is` cannot be lied to
        names: list[ast.expr] = [ast.Constant(operator) for operator in operators]
        operands = [node.left, *node.comparators]
        groups: list[ast.expr] = [ast.Tuple(group, ast.Load()) for group in (names, operands)]
        return ast.Call(ast.Name(self._compare, ast.Load()), groups, [])
