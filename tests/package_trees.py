"""The package's modules as trees, parsed once for all tests that read code."""

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(file)))
