"""What verdicts on programs may name: functions and types that do no harm with any plain data."""

from __future__ import annotations

import datetime
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from hybridrl.rewards.plain_data import Array, checked_decimal

MOST_ITEMS = 1_000_000
"""Of anything that a verdict makes."""
_MOST_JOINED = 10_000  # lists, in a sum


def _range(*bounds: int) -> range:
    found = range(*bounds)
    if len(found) > MOST_ITEMS:
        raise ValueError("a range too long")
    return found


def _bytes(content: Any = b"") -> bytes:
    if isinstance(content, int):
        raise TypeError("a number of zeros")
    return bytes(content)


def _fraction(*parts: Any) -> Fraction:
    if any(isinstance(part, str) and "e" in part.lower() for part in parts):
        raise ValueError("a fraction of any number of digits")
    return Fraction(*parts)


def _decimal(value: Any) -> Decimal:
    return checked_decimal(Decimal(value))


def _sum(items: Any, start: Any = 0) -> Any:
    items = list(items)
    if len(items) > _MOST_JOINED and not all(isinstance(item, int | float) for item in items):
        raise ValueError("a sum of so many lists that it takes long")
    return sum(items, start)


def _check_numbers(thing: Any) -> None:
    """Refuses to make an array of texts, of which each would take as much as the longest."""
    if isinstance(thing, list | tuple):
        for item in thing:
            _check_numbers(item)
    elif not isinstance(thing, int | float | complex):
        raise TypeError("no array of numbers")


def _as_array(thing: Any) -> Any:
    import numpy as np

    if isinstance(thing, Array):
        return thing.values
    _check_numbers(thing)
    return np.array(thing)


def _numpy_compare(name: str) -> Callable[..., bool]:
    """A function of numpy that compares two arrays, of lists of numbers or of `Array`s."""

    def call(left: Any, right: Any, **options: float) -> bool:
        import numpy as np

        arrays = [_as_array(left), _as_array(right)]
        largest = math.prod(np.broadcast_shapes(*(array.shape for array in arrays)))
        if largest > MOST_ITEMS or any(array.dtype.hasobject for array in arrays):
            raise ValueError("no two arrays of numbers of a likely size")
        return bool(np.all(getattr(np, name)(*arrays, **options)))

    return call


# What may be applied to what a program returned.
_APPLIED: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (abs, all, any, divmod, isinstance, len, max, min, reversed, round, sorted, sum)
} | {"type": lambda thing: type(thing), "zip": zip, "enumerate": enumerate}
_TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
}
_OF_MATH = ["isclose", "isnan", "isinf", "isfinite", "sqrt", "floor", "ceil", "fabs"]
_OF_MATH += ["pi", "e", "tau", "inf", "nan"]
_UNQUALIFIED: dict[str, Any] = {
    "collections.Counter": Counter,
    "collections.OrderedDict": OrderedDict,
    "collections.deque": deque,
    "decimal.Decimal": Decimal,
    "fractions.Fraction": Fraction,
    "math.isclose": math.isclose,
}
_OF_MODULES: dict[str, Any] = {
    **_UNQUALIFIED,
    **{f"math.{name}": getattr(math, name) for name in _OF_MATH},
    "datetime.date": datetime.date,
    "datetime.time": datetime.time,
    "datetime.datetime": datetime.datetime,
    "datetime.timedelta": datetime.timedelta,
    **{f"numpy.{name}": _numpy_compare(name) for name in ("allclose", "array_equal", "isclose")},
    "numpy.array": list,
}
FUNCTIONS: dict[str, Any] = {
    **{**_APPLIED, **_TYPES, **_OF_MODULES, "range": _range},
    # Tests name these without importing them, as programs do.
    **{name.partition(".")[2]: function for name, function in _UNQUALIFIED.items()},
}
"""What an expression may name, by its full name."""
CALLED: dict[Any, Callable[..., Any]] = {
    **{bytes: _bytes, Fraction: _fraction, Decimal: _decimal},
    sum: _sum,
}
"""What is called in place of what is named, which could take any memory or time."""
ALIASES = {name.partition(".")[0]: name.partition(".")[0] for name in _OF_MODULES} | {"np": "numpy"}
"""Modules, as a test calls them that does not import them itself."""
TEXT_METHODS = frozenset({"lower", "upper", "strip", "lstrip", "rstrip", "title", "capitalize"})
TEXT_METHODS |= {"startswith", "endswith", "casefold"}
"""Methods of texts, which nothing else has."""
