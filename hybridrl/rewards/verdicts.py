"""The verdict on what a program returned: an expression of a test, over plain data, evaluated here.

It is no `eval`: tests come from data files, and what they are applied to from a model. Only the
kinds of expressions and the functions below exist, none of which can reach anything else, and what
would take much memory or time is refused.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import operator
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from hybridrl.rewards.plain_data import Opaque
from hybridrl.rewards.verdict_functions import ALIASES, CALLED, FUNCTIONS, MOST_ITEMS, TEXT_METHODS

_MOST_STEPS = 1_000_000
_MOST_BITS = 100_000  # of a number


_NUMBERS = {int, bool, float, complex, Decimal, Fraction, datetime.timedelta}


class UnknownExpressionError(Exception):
    """This kind of expression, or this function, cannot be evaluated here."""


class Observed(ast.expr):
    """Stands in an expression for what the program's process sent.

    Attributes:
        number: of the observation.
        operators: by which the values are compared; empty where there is one value and nothing to
            compare.
    """

    _fields = ("number", "operators")

    def __init__(self, number: int, operators: tuple[str, ...]) -> None:
        super().__init__()
        self.number, self.operators = number, operators


class Either(ast.expr):
    """An expression over data that a variable holds, or, where it holds an object of the program,
    what the program's process makes of it.

    Attributes:
        data: a call with it.
        object: an `Observed`.
    """

    _fields = ("data", "object")

    def __init__(self, data: ast.Call, object: ast.expr) -> None:
        super().__init__()
        self.data, self.object = data, object


BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.BitXor: operator.xor,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda item, container: item in container,
    "not in": lambda item, container: item not in container,
    "is": operator.is_,
    "is not": operator.is_not,
}


class Evaluation:
    """Evaluates expressions.

    Args:
        names: values by name.
        observed: by their numbers, a list of values, or whether a comparison of objects holds.
    """

    def __init__(self, names: Mapping[str, Any], observed: Mapping[int, Any]) -> None:
        self._scope = dict(names)
        self._answers = observed
        self._steps = 0
        self.was_inside = False
        """Whether the program's own process decided a comparison."""

    def value(self, node: ast.expr) -> Any:
        """The value of an expression.

        Raises:
            UnknownExpressionError: if there is no way to evaluate it here.
            Exception: what evaluating it raises, such as a KeyError where nothing was observed.
        """
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise ValueError("an expression of too many steps")
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise UnknownExpressionError(ast.dump(node)[:80])
        return method(node)

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _observed(self, node: Observed) -> Any:
        found = self._answers[node.number]
        if isinstance(found, bool) and node.operators:
            self.was_inside = True
            return found
        if isinstance(found, bool) or len(found) != max(1, len(node.operators) + 1):
            raise ValueError("not what was asked for")
        return _compared(node.operators, found) if node.operators else found[0]

    def _either(self, node: Either) -> Any:
        given = [*node.data.args, *(keyword.value for keyword in node.data.keywords)]
        with contextlib.suppress(TypeError):  # such as of objects that have an order
            if not any(isinstance(self.value(argument), Opaque) for argument in given):
                return self.value(node.data)
        return self.value(node.object)

    def _name(self, node: ast.Name) -> Any:
        if node.id in self._scope:
            return self._scope[node.id]
        if node.id in FUNCTIONS:
            return FUNCTIONS[node.id]
        raise UnknownExpressionError(node.id)

    def _attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id not in self._scope:
            module = ALIASES.get(node.value.id, node.value.id)
            if f"{module}.{node.attr}" in FUNCTIONS:
                return FUNCTIONS[f"{module}.{node.attr}"]
        raise UnknownExpressionError(node.attr)

    def _list(self, node: ast.List | ast.Tuple | ast.Set) -> list[Any]:
        return [self.value(item) for item in node.elts]

    def _tuple(self, node: ast.Tuple) -> tuple[Any, ...]:
        return tuple(self._list(node))

    def _set(self, node: ast.Set) -> set[Any]:
        items = self._list(node)
        if any(isinstance(item, Opaque) for item in items):
            raise TypeError("which objects are equal is not known here")
        return set(items)

    def _dict(self, node: ast.Dict) -> dict[Any, Any]:
        if None in node.keys:
            raise UnknownExpressionError("**")
        return {
            self.value(key): self.value(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }

    def _subscript(self, node: ast.Subscript) -> Any:
        if isinstance(node.slice, ast.Slice):
            raise UnknownExpressionError("slice")
        return self.value(node.value)[self.value(node.slice)]

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        return _UNARY[type(node.op)](self.value(node.operand))

    def _boolop(self, node: ast.BoolOp) -> Any:
        ends_at = isinstance(node.op, ast.Or)
        for operand in node.values:
            found = self.value(operand)
            if bool(found) is ends_at:
                break
        return found

    def _binop(self, node: ast.BinOp) -> Any:
        if type(node.op) not in BINARY:
            raise UnknownExpressionError(type(node.op).__name__)
        left, right = self.value(node.left), self.value(node.right)
        _check_size(node.op, left, right)
        return BINARY[type(node.op)](left, right)

    def _compare(self, node: ast.Compare) -> Any:
        operators = tuple(COMPARISONS[type(op)] for op in node.ops)
        return _compared(operators, [self.value(n) for n in (node.left, *node.comparators)])

    def _call(self, node: ast.Call) -> Any:
        arguments = [self.value(argument) for argument in node.args]
        options = {k.arg: self.value(k.value) for k in node.keywords if k.arg}
        if len(options) < len(node.keywords):
            raise UnknownExpressionError("**")
        if isinstance(node.func, ast.Attribute) and node.func.attr in TEXT_METHODS:
            text = self.value(node.func.value)
            if type(text) is not str:
                raise TypeError("no text")
            return getattr(text, node.func.attr)(*arguments, **options)
        function = self.value(node.func)
        if not any(function is known for known in FUNCTIONS.values()):
            raise UnknownExpressionError("a call of a value")
        return CALLED.get(function, function)(*arguments, **options)

    def _generatorexp(self, node: ast.GeneratorExp | ast.ListComp | ast.SetComp) -> list[Any]:
        return list(self._each(node.elt, node.generators))

    def _listcomp(self, node: ast.ListComp) -> list[Any]:
        return self._generatorexp(node)

    def _setcomp(self, node: ast.SetComp) -> set[Any]:
        return set(self._generatorexp(node))

    def _each(self, item: ast.expr, generators: list[ast.comprehension]) -> Any:
        if not generators:
            yield self.value(item)
            return
        for bound in self.value(generators[0].iter):
            self._bind(generators[0].target, bound)
            if all(self.value(condition) for condition in generators[0].ifs):
                yield from self._each(item, generators[1:])

    def _bind(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._scope[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for inner, part in zip(target.elts, value, strict=True):
                self._bind(inner, part)
        else:
            raise UnknownExpressionError("target")


def _compared(operators: tuple[str, ...], operands: list[Any]) -> Any:
    found: Any = True
    for name, left, right in zip(operators, operands, operands[1:], strict=False):
        found = _COMPARE[name](left, right)
        if not found:
            break
    return found


def _check_size(op: ast.operator, left: Any, right: Any) -> None:
    """Refuses an operation whose result takes much memory or time."""
    kinds = {type(left), type(right)}
    if isinstance(op, ast.Pow):
        if kinds <= {int, bool} and left.bit_length() * abs(right) > _MOST_BITS:
            raise ValueError("a power too large")
        if not kinds <= {int, bool, float, complex}:
            raise TypeError("a power of no plain number")
    elif isinstance(op, ast.Mult) and not kinds <= _NUMBERS:
        length, times = (len(left), right) if type(right) is int else (len(right), left)
        if type(times) is not int or length * times > MOST_ITEMS:
            raise ValueError("a product too long")
    elif isinstance(op, ast.Mod) and not kinds <= _NUMBERS:
        raise TypeError("a remainder of no number")
