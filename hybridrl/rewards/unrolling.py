"""Writing tests out: loops over literals, and functions `check(candidate)`, as plain statements."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from hybridrl.rewards.verdicts import Evaluation

_MOST_ROUNDS = 256  # of a loop that is written out


def written_out(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements with loops over literals and calls of `check(candidate)` written out."""
    checks = {s.name: s for s in body if isinstance(s, ast.FunctionDef) and _is_check(s)}
    called = [_called_check(s, checks) for s in body]
    lists = _lists_to_loop_over(body)
    for statement, check in zip(body, called, strict=True):
        if isinstance(statement, ast.FunctionDef) and called.count(checks.get(statement.name)) == 1:
            continue
        if check is not None and called.count(check) == 1:
            assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            target = ast.Name(check.args.args[0].arg, ast.Store())
            yield ast.Assign([target], statement.value.args[0])
            yield from written_out(check.body)
            continue
        loop = _as_loop(statement)
        if loop is not None and (rounds := _rounds(loop, lists)) is not None:
            for value in rounds:
                yield from _assigned(loop.target, value)
                yield from written_out(loop.body)
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            if statement.value not in lists.values():
                yield from _assigned(statement.targets[0], statement.value)
        else:
            yield statement


def _as_loop(statement: ast.stmt) -> ast.For | None:
    """A loop, also where it is written as `assert all(... for ... in ...)`."""
    if isinstance(statement, ast.For):
        return statement
    test = statement.test if isinstance(statement, ast.Assert) else None
    if not (isinstance(test, ast.Call) and ast.unparse(test.func) == "all" and test.args):
        return None
    each = test.args[0]
    if not isinstance(each, ast.GeneratorExp | ast.ListComp) or len(each.generators) != 1:
        return None
    (generator,) = each.generators
    if generator.ifs or generator.is_async:
        return None
    return ast.For(generator.target, generator.iter, [ast.Assert(each.elt)], [])


def _lists_to_loop_over(body: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Displays that are assigned to a variable of which nothing is made but a loop over it that is
    written out."""
    names = [n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name)]
    looped = {
        loop.iter.id
        for statement in body
        if (loop := _as_loop(statement)) is not None and isinstance(loop.iter, ast.Name)
    }
    found: dict[str, ast.expr] = {}
    for statement in body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.List | ast.Tuple):
            (target, *more) = statement.targets
            name = target.id if isinstance(target, ast.Name) and not more else None
            if name in looped and names.count(name) == 2:
                found[name] = statement.value
    loops = [loop for s in body if (loop := _as_loop(s)) is not None]
    out = {
        loop.iter.id
        for loop in loops
        if isinstance(loop.iter, ast.Name) and _rounds(loop, found) is not None
    }
    return {name: display for name, display in found.items() if name in out}


def _is_check(function: ast.FunctionDef) -> bool:
    arguments = function.args
    others = (arguments.posonlyargs, arguments.kwonlyargs, arguments.defaults)
    left = (ast.Return, ast.Yield, ast.YieldFrom, ast.Global, ast.FunctionDef, ast.Lambda)
    return (
        len(arguments.args) == 1
        and not any([*others, arguments.vararg, arguments.kwarg, function.decorator_list])
        and not any(isinstance(n, left) for s in function.body for n in ast.walk(s))
        and any(isinstance(n, ast.Assert) for n in ast.walk(function))
    )


def _called_check(
    statement: ast.stmt, checks: Mapping[str, ast.FunctionDef]
) -> ast.FunctionDef | None:
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return None
    call = statement.value
    if not isinstance(call.func, ast.Name) or len(call.args) != 1 or call.keywords:
        return None
    return checks.get(call.func.id) if isinstance(call.args[0], ast.Name) else None


def _rounds(loop: ast.For, lists: Mapping[str, ast.expr]) -> Sequence[ast.expr] | None:
    """What a loop goes over, if that is known, and it does nothing but to go over it."""
    leaves = (ast.Break, ast.Continue, ast.Global)
    inside = [node for statement in loop.body for node in ast.walk(statement)]
    if loop.orelse or any(isinstance(node, leaves) for node in inside):
        return None
    if not any(isinstance(node, ast.Assert) for node in inside):
        return None
    iterated = lists.get(loop.iter.id) if isinstance(loop.iter, ast.Name) else loop.iter
    rounds: Sequence[ast.expr] = ()
    if isinstance(iterated, ast.List | ast.Tuple):
        rounds = iterated.elts
    elif iterated is not None:
        try:
            values = [*Evaluation({}, {}).value(iterated)]
            rounds = [ast.parse(repr(value), mode="eval").body for value in values]
        except Exception:  # it is not known, or there is no literal for it
            return None
    if not 0 < len(rounds) <= _MOST_ROUNDS or any(isinstance(r, ast.Starred) for r in rounds):
        return None
    return rounds


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[ast.Assign]:
    """An assignment, or several, if it is of literals to several names."""
    displays = (ast.Tuple, ast.List)
    if isinstance(target, displays) and isinstance(value, displays):
        names = {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
        read = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        starred = any(isinstance(n, ast.Starred) for n in (*target.elts, *value.elts))
        if len(target.elts) == len(value.elts) and not names & read and not starred:
            for inner, part in zip(target.elts, value.elts, strict=True):
                yield from _assigned(inner, part)
            return
    yield ast.Assign([target], value)
