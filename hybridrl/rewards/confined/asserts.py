"""Runs a program and then tests of it, in one sandboxed process. Sent there as text, by `code`."""

from __future__ import annotations

import builtins
import operator
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

# The program may replace whatever it can reach, so nothing is looked up once it has begun: what is
# needed later is bound to local names first.


def judge(
    program: str, needs: list[str], tests: list[str], compare_name: str, nonce: bytes
) -> NoReturn:
    """Writes the nonce and a test's number to the standard output for every test that passes.

    Args:
        program: its source.
        needs: modules to import first, so that the program cannot replace them unseen.
        tests: sources, in which `compare_name(operators, operands)` stands for comparisons.
        compare_name: no name that the program could know.
        nonce: what the program must not know.
    """
    for name in needs:
        __import__(name)
    run, translate, number, anything = exec, compile, enumerate, BaseException
    write, leave, dictionary = os.write, os._exit, dict
    untrace, unprofile = sys.settrace, sys.setprofile
    builtin_names, originals = vars(builtins), dict(vars(builtins))
    compare = make_compare()
    results = os.dup(1)
    nowhere = os.open("/dev/null", os.O_RDWR)
    os.dup2(nowhere, 1)  # what the program prints counts neither as a result nor as output
    os.dup2(nowhere, 2)
    module = type(sys)("program")
    sys.modules["program"] = module  # where dataclasses and pickle look for its classes
    names = vars(module)

    try:
        run(translate(program, "program.py", "exec", dont_inherit=True), names)
        untrace(None)
        unprofile(None)
        builtin_names.update(originals)
        scope = dictionary(names)
        scope[compare_name] = compare
    except anything:  # a SystemExit too: a program that ends before its tests fails them
        leave(1)
    for i, test in number(tests):
        try:
            run(translate(test, "test.py", "exec", dont_inherit=True), scope)
        except anything:
            continue
        write(results, b"\n%b:%d\n" % (nonce, i))
    leave(0)


def make_compare() -> Callable[..., Any]:
    """A function that compares as Python does, but not plain data with an object that has its own
    idea of comparing: that one may say that it equals everything."""
    contains = operator.contains
    operators: dict[str, Callable[..., Any]] = {
        "==": operator.eq,
        "!=": operator.ne,
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
        "in": lambda item, container: contains(container, item),
        "not in": lambda item, container: not contains(container, item),
    }
    methods = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
    written_in_c = type(int.__eq__)
    # A class cannot lie about these two, whatever its metaclass.
    get_order, get_names = type.__dict__["__mro__"].__get__, type.__dict__["__dict__"].__get__
    honest = {  # methods of the standard library that are written in Python
        function
        for module, name in (("collections", "Counter"), ("fractions", "Fraction"))
        for method in methods
        if type(function := getattr(getattr(sys.modules.get(module), name, int), method))
        is not written_in_c
    }
    sequences = (list, tuple, set, frozenset)
    kind_of, identity, is_a, size, mapping = type, id, isinstance, len, dict
    items_in, pairs_in = {kind: kind.__iter__ for kind in sequences}, dict.items
    new_set, error, numbered = set, TypeError, enumerate

    def is_honest_kind(kind: type) -> bool:
        for method in methods:
            for base in get_order(kind):
                function = get_names(base).get(method)
                if function is not None:
                    if kind_of(function) is not written_in_c and function not in honest:
                        return False
                    break
        return True

    def is_plain(thing: Any) -> bool:
        waiting, seen, kinds = [thing], new_set(), new_set()
        while waiting:
            thing = waiting.pop()
            kind = kind_of(thing)
            if identity(kind) not in kinds:
                if not is_honest_kind(kind):
                    return False
                kinds.add(identity(kind))
            if identity(thing) in seen:
                continue
            for sequence in sequences:
                if is_a(thing, sequence):
                    seen.add(identity(thing))
                    waiting.extend(items_in[sequence](thing))
            if is_a(thing, mapping):
                seen.add(identity(thing))
                for pair in pairs_in(thing):
                    waiting.extend(pair)
        return True

    def compare(names: tuple[str, ...], operands: tuple[Any, ...]) -> Any:
        plain = [is_plain(operand) for operand in operands]
        result = True
        for i, name in numbered(names):
            left, right = plain[i], plain[i + 1]
            if left != right and (right or name not in ("in", "not in")):
                raise error("plain data is compared with an object that compares by itself")
            result = operators[name](operands[i], operands[i + 1])
            if i + 1 < size(names) and not result:
                return result
        return result

    return compare
