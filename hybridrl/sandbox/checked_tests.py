"""Tests as the judge runs them: compiled, and changed so that what they check is counted, for one
that checks nothing proves nothing."""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
from collections.abc import Iterable
from types import CodeType
from typing import Any, NamedTuple

_ENDS = ("exit", "_exit", "quit", "fail", "abort")
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class CheckedTest(NamedTuple):
    """A test.

    Attributes:
        text: as it was given.
        code: calls `__passed__` after each check and compares by `__same__` where the test says
            `is`.
        names: all that it uses, imports or asks objects for.
        doctests: texts in it with sessions of Python.
        defined: functions and classes that it defines and does not call.
        uncalled: a call of a function with asserts that nothing names; empty if there is none.
    """

    text: str
    code: CodeType
    names: tuple[str, ...]
    doctests: tuple[str, ...]
    defined: tuple[str, ...]
    uncalled: str


@functools.lru_cache(maxsize=1 << 12)
def check_test(test: str) -> CheckedTest:
    """Compile a test; it is kept for the other responses to its prompt.

    Raises:
        SyntaxError, ValueError: if it is neither Python nor a doctest.
    """
    try:
        tree = ast.parse(test)
    except SyntaxError:
        if not _is_doctest(test):
            raise
        tree = ast.Module([ast.Expr(ast.Constant(test))], [])
    nodes = list(ast.walk(tree))
    alone = [node.value for node in nodes if isinstance(node, ast.Expr)]
    texts = [value.value for value in alone if isinstance(value, ast.Constant)]
    functions = [node.func for node in nodes if isinstance(node, ast.Call)]
    called = {function.id for function in functions if isinstance(function, ast.Name)}
    defined = {statement.name for statement in tree.body if isinstance(statement, _DEFINITIONS)}
    doctests = tuple(text for text in texts if isinstance(text, str) and _is_doctest(text))
    names = _names(nodes).union(*map(_names_in_doctest, doctests))
    counted = ast.fix_missing_locations(_Counting().visit(tree))
    return CheckedTest(
        test,
        compile(counted, "test.py", "exec", dont_inherit=True),
        tuple(names),
        doctests,
        tuple(sorted(defined - called)),
        next(filter(None, (_call_if_unnamed(s, names) for s in tree.body)), ""),
    )


def _is_doctest(text: str) -> bool:
    """Return whether a text has lines that a session with Python would begin with."""
    return any(line.lstrip().startswith(">>> ") for line in text.splitlines())


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return names.union(*({alias.name for alias in node.names} for node in imports))


def _names_in_doctest(text: str) -> set[str]:
    names: set[str] = set()
    for example in doctest.DocTestParser().get_examples(text):
        with contextlib.suppress(SyntaxError):  # which the example may be about
            names |= _names([*ast.walk(ast.parse(example.source))])
    return names


def _call_if_unnamed(statement: ast.stmt, names: set[str]) -> str:
    """Return a call of a function with asserts that nothing names; empty for anything else."""
    if not isinstance(statement, ast.FunctionDef) or statement.name in names:
        return ""
    is_checking = any(isinstance(node, ast.Assert) for node in ast.walk(statement))
    if not is_checking or statement.name.startswith("test"):
        return ""
    given = "<the program's function>" if statement.args.args else ""
    return f"{statement.name}({given})"


class _Counting(ast.NodeTransformer):
    """Inserts a call of `__passed__` where a check has held: after an assert, after a call of
    `assertEqual` and its like, after a block that expects an exception, after an `if` that would
    have raised, and where an expected exception is caught."""

    def visit_Assert(self, node: ast.Assert) -> Any:
        self.generic_visit(node)
        return [node, _passed()]

    def visit_Expr(self, node: ast.Expr) -> Any:
        self.generic_visit(node)
        is_check = isinstance(node.value, ast.Call) and _name(node.value).startswith("assert")
        return [node, _passed()] if is_check else node

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        names = [_name(item.context_expr) for item in node.items]
        is_check = any(name.startswith("assert") or name == "raises" for name in names)
        return [node, _passed()] if is_check else node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        return [node, _passed()] if _ends(node.body) or _ends(node.orelse) else node

    def visit_Try(self, node: ast.Try) -> Any:
        is_check = _ends(node.body) or _ends(node.orelse)
        self.generic_visit(node)
        for handler in node.handlers if is_check else ():
            handler.body.append(_passed())
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        wholes = {ast.dump(_uncut(argument)) for argument in node.args}
        if getattr(node.func, "id", "") == "zip" and len(wholes) == 1 and not node.keywords:
            node.keywords.append(ast.keyword("strict", ast.Constant(False)))
        return node

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Is | ast.IsNot):
            return node
        same = ast.Call(ast.Name("__same__", ast.Load()), [node.left, *node.comparators], [])
        is_same = isinstance(node.ops[0], ast.Is)
        found = same if is_same else ast.UnaryOp(ast.Not(), same)
        return ast.copy_location(found, node)


def _passed() -> ast.Expr:
    return ast.Expr(ast.Call(ast.Name("__passed__", ast.Load()), [], []))


def _name(node: ast.expr) -> str:
    called = node.func if isinstance(node, ast.Call) else node
    return getattr(called, "attr", getattr(called, "id", ""))


def _uncut(node: ast.expr) -> ast.expr:
    """Return the sequence that a slice such as `found[1:]` is taken of; anything else as it is."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        return node.value
    return node


def _ends(body: list[ast.stmt]) -> bool:
    """Return whether a block ends in a failure of the test."""
    last = body[-1] if body else None
    if isinstance(last, ast.Expr):
        return isinstance(last.value, ast.Call) and _name(last.value) in _ENDS
    if isinstance(last, ast.Assert):
        return isinstance(last.test, ast.Constant) and not last.test.value
    return isinstance(last, ast.Raise)
