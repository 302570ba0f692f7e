"""Comparisons that are made in the program's own process, and what cannot be gained there by
objects that claim to equal everything."""

from __future__ import annotations

import operator
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

_PLAIN = """
builtins bool int float complex str bytes bytearray NoneType list tuple set frozenset dict range
collections Counter deque OrderedDict defaultdict; decimal Decimal; fractions Fraction
datetime date time datetime timedelta timezone; numpy ndarray bool_ str_
numpy int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128
"""
_METHODS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__contains__")


def make_compare() -> Callable[[Sequence[str], Sequence[Any]], Any]:
    """A function that compares as Python does, but not plain data with anything else: an object may
    say that it equals everything.

    Plain is what has one of the types above, or one derived from it that compares in no way of its
    own, such as a named tuple's, and holds only such. To be called before the program begins; of
    modules that are not loaded then, no type is plain.
    """
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
    types: list[type] = []
    for line in _PLAIN.strip().replace(";", "\n").splitlines():
        module, *names = line.split()
        loaded = sys.modules.get(module)
        types += [type(None) if n == "NoneType" else getattr(loaded, n) for n in names if loaded]
    kind_of, identity, size, new_set, error = type, id, len, set, TypeError
    numbered = enumerate
    plain_kinds = {identity(kind): kind for kind in types}
    # Classes written in Python, whose methods a program may replace.
    changeable = {
        identity(kind): (vars(kind), [(name, vars(kind).get(name)) for name in _METHODS])
        for kind in types
        if not kind.__flags__ & 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
    }
    arrays = [kind for kind in types if kind.__name__ == "ndarray"]
    get_type_of_items = vars(arrays[0])["dtype"].__get__ if arrays else None
    sequences = (list, tuple, set, frozenset, *(k for k in types if k.__name__ == "deque"))
    items_in = {identity(kind): kind.__iter__ for kind in sequences}
    dictionaries = {identity(k) for k in types if issubclass(k, dict)}
    pairs_in = dict.items
    classes_of, names_of = vars(type)["__mro__"].__get__, vars(type)["__dict__"].__get__

    def plain_kind(kind: type) -> int | None:
        for base in classes_of(kind):
            if identity(base) in plain_kinds:
                return identity(base)
            names = names_of(base)
            for method in _METHODS:
                if method in names:
                    return None
        return None

    def is_plain(thing: Any) -> bool:
        waiting, seen = [thing], new_set()
        while waiting:
            thing = waiting.pop()
            kind = plain_kind(kind_of(thing))
            if kind is None:
                return False
            if kind in changeable:
                methods, originals = changeable[kind]
                for name, original in originals:
                    if methods.get(name) is not original:
                        return False
            if identity(thing) in seen:
                continue
            if kind in items_in:
                seen.add(identity(thing))
                waiting.extend(items_in[kind](thing))
            elif kind in dictionaries:
                seen.add(identity(thing))
                for pair in pairs_in(thing):
                    waiting.extend(pair)
            elif plain_kinds[kind] in arrays and get_type_of_items(thing).hasobject:
                return False
        return True

    def compare(names: Sequence[str], operands: Sequence[Any]) -> Any:
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
