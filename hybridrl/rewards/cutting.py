"""Cutting the expression of an assert: what a program is asked, and what is made of it outside."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from hybridrl.rewards.verdict_functions import ALIASES, FUNCTIONS, TEXT_METHODS
from hybridrl.rewards.verdicts import BINARY, COMPARISONS, Either, Evaluation, Observed

COMPARED_INSIDE = ("==", "!=", "<", "<=", ">", ">=", "in", "not in")
"""Comparisons that objects may have ideas of their own about."""
_COMPREHENSIONS = (ast.GeneratorExp, ast.ListComp, ast.SetComp)
_NOT_OUTSIDE = (ast.Slice, ast.IfExp, ast.JoinedStr, ast.Lambda)
"""What is evaluated by the program's process only."""
_LIST = ast.Name("list", ast.Load())


class CannotCutError(Exception):
    """An assert's verdict cannot be made outside."""


class Cut(NamedTuple):
    """An expression that is cut.

    Attributes:
        verdict: what is evaluated outside.
        asked: statements by which the program's process sends what is observed in it.
        tells: whether what is expected may be among what the program's process is asked.
    """

    verdict: ast.expr
    asked: list[ast.stmt]
    tells: bool


class ExpressionCutter:
    """Cuts expressions.

    Args:
        known: values of variables; may change between expressions.
        own: functions, classes and modules that the tests bring along.
        variables: names that the tests bind.
        observe: the name of the function by which the program's process answers.
    """

    def __init__(
        self,
        known: Mapping[str, Any],
        own: Collection[str],
        variables: Collection[str],
        observe: str,
    ) -> None:
        self._known, self._own, self._variables = known, own, variables
        self._observe = observe
        self._bound: set[str] = set()  # names of comprehensions that are evaluated outside
        self._first = 0
        self._asked: list[ast.stmt] = []
        self._tells = False

    def cut(self, node: ast.expr, first: int) -> Cut:
        """Cuts an expression of which it counts whether it is true.

        Args:
            first: the number of its first observation.

        Raises:
            CannotCutError: if it is not known what in it is up to the program.
        """
        self._first, self._asked, self._tells = first, [], False
        verdict = self._truth(node)
        return Cut(verdict, self._asked, self._tells)

    def _truth(self, node: ast.expr) -> ast.expr:
        """An expression of which it counts whether it is true."""
        if isinstance(node, ast.BoolOp):
            return ast.BoolOp(node.op, [self._truth(value) for value in node.values])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ast.UnaryOp(node.op, self._truth(node.operand))
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if isinstance(node, ast.Call) and self._root(node.func) in self._own:
            raise CannotCutError  # a function of the test decides
        return self._operand(node, tests_it=True)

    def _comparison(self, node: ast.Compare) -> ast.expr:
        operands = [node.left, *node.comparators]
        operators = tuple(COMPARISONS[type(op)] for op in node.ops)
        are_known = [self._is_known(operand) for operand in operands]
        if all(are_known):  # then it is the first call that is tested: a `sum` of the program's
            tested = [isinstance(operand, ast.Call) for operand in operands]
            if True not in tested:
                return node
            are_known[tested.index(True)] = False
        searched = operators == ("in",) or operators == ("not in",)
        if not any(are_known) or (searched and isinstance(operands[1], ast.Name)):
            # Objects of the program may have a way of comparing of their own.
            are_usual = all(op in COMPARED_INSIDE for op in operators)
            if are_usual and not any(are_known[1:]):
                return self._observed(operators, operands)
        left, *others = (
            operand if known else self._operand(operand, tests_it=True)
            for operand, known in zip(operands, are_known, strict=True)
        )
        if any(op.startswith("is") for op in operators):
            singletons = (ast.Constant, ast.Name)
            if not any(k and isinstance(o, singletons) for k, o in zip(are_known, operands)):  # noqa: B905
                raise CannotCutError
        return ast.Compare(left, node.ops, others)

    def _operand(self, node: ast.expr, tests_it: bool = False) -> ast.expr:
        """What is evaluated outside, down to where the program is asked.

        Args:
            tests_it: a call in it, although it could be evaluated outside, is of the program.
        """
        if not tests_it and self._is_known(node):
            return node
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            if any(isinstance(item, ast.Starred) for item in node.elts):
                return self._observed((), [node])
            return type(node)(**{**vars(node), "elts": [self._operand(e) for e in node.elts]})
        if isinstance(node, ast.Dict) and None not in node.keys:
            keys = [key and self._operand(key) for key in node.keys]
            return ast.Dict(keys, [self._operand(value) for value in node.values])
        if isinstance(node, ast.UnaryOp):
            return ast.UnaryOp(node.op, self._operand(node.operand))
        if isinstance(node, ast.BinOp):
            are_known = [self._is_known(node.left), self._is_known(node.right)]
            if type(node.op) in BINARY and any(are_known) and not all(are_known):
                return ast.BinOp(self._operand(node.left), node.op, self._operand(node.right))
        if isinstance(node, ast.Call) and (applied := self._applied(node)) is not None:
            return applied
        if isinstance(node, _COMPREHENSIONS):
            comprehension = self._comprehension(node)
            if comprehension is not None:
                return comprehension
        return self._observed((), [node])

    def _applied(self, node: ast.Call) -> ast.expr | None:
        """A call of a function that is applied outside to what the program returns."""
        is_method = (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in TEXT_METHODS
            and isinstance(node.func.value, ast.Call)
        )
        if not is_method and not self._is_function(node.func):
            return None
        if isinstance(node.func, ast.Name) and node.func.id == "str":
            return None  # objects have texts of their own
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if any(isinstance(a, ast.Starred | ast.Lambda) for a in given):
            return None
        if any(not keyword.arg for keyword in node.keywords):
            return None
        if not is_method and all(map(self._is_known, given)):
            return None  # a function of the program, of the same name
        function = node.func
        if is_method:
            assert isinstance(node.func, ast.Attribute)
            function = ast.Attribute(self._operand(node.func.value), node.func.attr, ast.Load())
        arguments = [self._operand(argument) for argument in node.args]
        options = [ast.keyword(k.arg, self._operand(k.value)) for k in node.keywords]
        call = ast.Call(function, arguments, options)
        if not is_method and arguments and all(map(_is_of_program, arguments)):
            # An object of the program may have a length, or an order, of its own. What else is
            # given may be what is expected, or a tolerance: the program shall not apply that.
            applied = ast.Call(node.func, self._inside(arguments), node.keywords)
            made_of = [number for argument in arguments for number in _numbers_in(argument)]
            return Either(data=call, object=self._observed((), [applied], made_of))
        return call

    def _comprehension(
        self, node: ast.GeneratorExp | ast.ListComp | ast.SetComp
    ) -> ast.expr | None:
        """One that goes through what the program returned; None if it asks the program for each
        item."""
        before = len(self._asked), set(self._bound)
        generators = []
        try:
            for generator in node.generators:
                iterated = self._operand(generator.iter)
                if isinstance(iterated, Observed) and self._is_function(_LIST):
                    iterated = self._operand(ast.Call(_LIST, [generator.iter], []))
                self._bound |= {n.id for n in ast.walk(generator.target) if isinstance(n, ast.Name)}
                inner = [self._without_program(condition) for condition in generator.ifs]
                generators.append(ast.comprehension(generator.target, iterated, inner, 0))
            return type(node)(self._without_program(node.elt), generators)
        except CannotCutError:
            del self._asked[before[0] :]
            return None
        finally:
            self._bound = before[1]

    def _without_program(self, node: ast.expr) -> ast.expr:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call) and not self._is_function(inner.func):
                raise CannotCutError
            if isinstance(inner, _NOT_OUTSIDE):
                raise CannotCutError
            if isinstance(inner, ast.Attribute) and not self._is_function(inner):
                raise CannotCutError  # objects of the program have attributes
            if isinstance(inner, ast.Name) and not (
                self._is_function(inner)
                or any(inner.id in names for names in (self._bound, self._known, ALIASES))
            ):
                raise CannotCutError
        return node

    def _inside(self, node: Any) -> Any:
        """What is evaluated outside as the program's process writes it, where variables hold what
        was observed."""
        if isinstance(node, list):
            return [self._inside(item) for item in node]
        if isinstance(node, Either):
            return self._inside(node.object)
        if isinstance(node, Observed):
            return ast.Name(f"{self._observe}_{node.number}", ast.Load())
        if not isinstance(node, ast.AST):
            return node
        return type(node)(**{name: self._inside(part) for name, part in ast.iter_fields(node)})

    def _observed(
        self,
        operators: tuple[str, ...],
        nodes: Sequence[ast.expr],
        made_of: Sequence[int] | None = None,
    ) -> ast.expr:
        """Has the program's process send the values of expressions.

        Args:
            made_of: the observations that they are made of; then they are sent only if there was an
                object among those.
        """
        for node in nodes:
            self._refuse_verdicts(node)
            if any(self._is_told(inner) for inner in ast.walk(node)):
                self._tells = True
        number = self._first + len(self._asked)
        nothing = ast.arguments([], [], None, [], [], None, [])
        asked: list[ast.expr] = [ast.Lambda(nothing, node) for node in nodes]
        names: list[ast.expr] = [ast.Constant(operator) for operator in operators]
        first: list[ast.expr] = [ast.Constant(number), ast.Tuple(names, ast.Load())]
        options = []
        if made_of is not None:
            options = [ast.keyword("made_of", ast.Tuple([*map(ast.Constant, made_of)], ast.Load()))]
        call = ast.Call(ast.Name(self._observe, ast.Load()), [*first, *asked], options)
        kept = ast.Name(f"{self._observe}_{number}", ast.Store())
        self._asked.append(ast.Assign([kept], call))
        return Observed(number=number, operators=operators)

    def _is_told(self, node: ast.AST) -> bool:
        """Whether a function of the test gets what the program returns, and something beside it."""
        if not isinstance(node, ast.Call) or self._root(node.func) not in self._own:
            return False
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        return len(given) > 1 and any(isinstance(n, ast.Call) for a in given for n in ast.walk(a))

    def _refuse_verdicts(self, node: ast.expr) -> None:
        """Refuses an expression in which something is compared, but for what a function of the
        program is given."""
        if isinstance(node, ast.Compare | ast.NamedExpr | ast.Await | ast.Yield):
            raise CannotCutError
        if isinstance(node, ast.Name) and node.id in self._bound:
            raise CannotCutError
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            if name not in self._own and not hasattr(builtins, name):
                return
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.expr | ast.comprehension | ast.keyword):
                self._refuse_verdicts(inner)  # type: ignore[arg-type]

    def _is_known(self, node: ast.expr) -> bool:
        """Whether its value is known without the program."""
        try:
            Evaluation(self._known, {}).value(node)
        except Exception:  # such as of a function of the program that is called like a built-in
            return False
        return True

    def _is_function(self, node: ast.expr) -> bool:
        """Whether this names a function that is applied outside."""
        if isinstance(node, ast.Name):
            if node.id in self._known:
                return callable(self._known[node.id])
            return node.id in FUNCTIONS and node.id not in self._variables
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = ALIASES.get(node.value.id, node.value.id)
            name = f"{module}.{node.attr}"
            return name in FUNCTIONS and node.value.id not in self._variables
        return False

    def _root(self, node: ast.expr) -> str:
        """The name with which that of a function begins; empty for those applied outside."""
        if self._is_function(node):
            return ""
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""


def _is_of_program(node: ast.expr) -> bool:
    """Whether all of an expression that is evaluated outside is what the program returned."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return all(map(_is_of_program, node.elts))
    return isinstance(node, Observed | Either)


def _numbers_in(node: ast.expr) -> list[int]:
    """Numbers of the observations in an expression."""
    return [inner.number for inner in ast.walk(node) if isinstance(inner, Observed)]
