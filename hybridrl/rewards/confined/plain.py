"""What a program returned, as plain data: made in its own process, and judged outside of it.

That process is the program's, which may have changed anything in it. That does no harm: what it
changes is what it returns, and what is expected of it is not there.
"""

from __future__ import annotations

import collections
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MOST_ITEMS = 1 << 20  # of an iterator, which may have no end


class ObjectFoundError(Exception):
    """There is an object in it that is no plain data."""


def plain(thing: Any, objects_too: bool) -> Any:
    """What JSON can say of data: of containers a pair of kind and content, and of what is of a kind
    derived from a plain one, such as a named tuple, its content.

    Args:
        objects_too: whether there may be objects in it that are no plain data.

    Raises:
        ObjectFoundError: if there may not.
    """
    if thing is None or thing is True or thing is False:
        return thing
    if isinstance(thing, int):
        value = int(thing)
        return value if -(1 << 63) < value < 1 << 63 else ["int", hex(value)]
    if isinstance(thing, float):
        return float(thing)
    if isinstance(thing, str):
        return str.__str__(thing)

    def all_of(items: Any) -> list[Any]:
        return [plain(item, objects_too) for item in items]

    def pairs_of(mapping: Any) -> list[Any]:
        return [all_of(pair) for pair in mapping.items()]

    for kind in (list, tuple, set, frozenset, collections.deque):
        if isinstance(thing, kind):
            return [kind.__name__, all_of(kind.__iter__(thing))]
    if isinstance(thing, dict):
        return ["counter" if isinstance(thing, collections.Counter) else "dict", pairs_of(thing)]
    if isinstance(thing, complex):
        return ["complex", [thing.real, thing.imag]]
    if isinstance(thing, bytes | bytearray):
        return ["bytes" if isinstance(thing, bytes) else "bytearray", thing.hex()]
    kind, module = type(thing), getattr(type(thing), "__module__", None)
    name = kind.__name__
    if kind is range:
        return ["range", [thing.start, thing.stop, thing.step]]
    if isinstance(thing, type({}.keys()) | type({}.values())):
        return ["keys" if "keys" in name else "values", all_of(thing)]
    if isinstance(thing, type({}.items())):
        return ["items", [all_of(pair) for pair in thing]]
    if module == "fractions" and name == "Fraction":
        return ["fraction", all_of((thing.numerator, thing.denominator))]
    if module == "decimal" and name == "Decimal":
        return ["decimal", str(thing)]
    if module == "datetime" and getattr(thing, "tzinfo", None) is None:
        moment = _moment(name, thing)
        if moment:
            return moment
    if module == "numpy" and hasattr(thing, "dtype"):
        if isinstance(thing, sys.modules["numpy"].generic):
            return plain(thing.item(), objects_too)
        if name == "ndarray" and thing.dtype.kind in "biufcU":
            sort = "U" if thing.dtype.kind == "U" else thing.dtype.str[1:]
            return ["array", [sort, list(thing.shape), all_of(thing.ravel().tolist())]]
    if module in ("builtins", "itertools") and hasattr(kind, "__next__"):
        items = []
        for item in thing:
            items.append(plain(item, objects_too))
            if len(items) > _MOST_ITEMS:
                raise ObjectFoundError
        return ["iterator", items]
    if not objects_too:
        raise ObjectFoundError
    return ["object", _truth(thing)]


def _truth(thing: Any) -> bool | None:
    try:
        return bool(thing)
    except Exception:
        return None


def _moment(name: str, thing: Any) -> Any:
    if name == "date":
        return [name, [thing.year, thing.month, thing.day]]
    if name == "time":
        return [name, [thing.hour, thing.minute, thing.second, thing.microsecond]]
    if name == "timedelta":
        return [name, [thing.days, thing.seconds, thing.microseconds]]
    if name == "datetime":
        day = [thing.year, thing.month, thing.day]
        return [name, [*day, thing.hour, thing.minute, thing.second, thing.microsecond]]
    return None
