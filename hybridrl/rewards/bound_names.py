"""Names that the statements of a test bind."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from hybridrl.rewards.verdict_functions import ALIASES


def bound(statements: Sequence[ast.stmt]) -> set[str]:
    """Names that statements bind, but for imports of functions that are known by these names."""
    found = set()
    for node in (n for statement in statements for n in ast.walk(statement)):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    return found - _imported(statements)


def _imported(statements: Sequence[ast.stmt]) -> set[str]:
    """Names of imports that mean what a verdict means by them."""
    found = set()
    for node in statements:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name
                if ALIASES.get(name) == alias.name:
                    found.add(name)
    return found


def brought_along(statements: Sequence[ast.stmt]) -> set[str]:
    """Names of functions, classes and modules that the tests themselves bring along."""
    found = set()
    for node in (n for statement in statements for n in ast.walk(statement)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            found |= {n.id for n in node.targets if isinstance(n, ast.Name)}
    return found
