"""The package's modules as trees, parsed once for all tests that read code."""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hybridrl"


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(file)))


def calls_of(file: str, name: str) -> list[ast.Call]:
    """Return the calls of `name` in a file of the package."""
    found = [
        node
        for node in nodes_of(PACKAGE / file)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name
    ]
    assert found, f"{file} no longer calls {name}"
    return found


def keywords_of(call: ast.Call) -> set[str]:
    return {word.arg for word in call.keywords if word.arg is not None}
