"""Plain data as it comes out of a sandbox: read without trust, into exact types and nothing else.

What a program writes may be anything; here it becomes numbers, texts, containers of them, and what
else `confined/asserts.py` can send, or it is refused. Nothing of it is ever run or unpickled.
"""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any


class Opaque:
    """Stands for an object that is no plain data. It equals nothing.

    Args:
        truth: whether it is true, as it says itself, which is worth as much as any truth that a
            program returns; None where it says neither.
    """

    def __init__(self, truth: Any) -> None:
        self._truth = truth

    def __bool__(self) -> bool:
        if not isinstance(self._truth, bool):
            raise TypeError("an object that is neither true nor false")
        return self._truth


class Iterated:
    """What an iterator, such as a generator, has given. Like an iterator, it equals no list."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


class Array:
    """An array of numpy's, of numbers, truths or texts. It equals nothing; the functions of numpy
    that a verdict may use take its `values`.

    Args:
        kind: of its numbers, as numpy writes it.
        shape: its sizes.
        items: all its items, in a list.
    """

    def __init__(self, kind: Any, shape: Any, items: Any) -> None:
        import numpy as np

        if kind not in _ARRAYS:
            raise ValueError(f"an array of {kind}")
        flat, sizes = _items(items), tuple(map(int, shape))
        if min(sizes, default=0) < 0 or math.prod(sizes) != len(flat):
            raise ValueError(f"{len(flat)} numbers for an array of the shape {sizes}")
        if kind == "U" and max(map(len, map(str, flat)), default=0) * len(flat) > _MOST_ITEMS:
            raise ValueError("an array of texts, of which each takes as much as the longest")
        self.values = np.array(flat, dtype=kind).reshape(sizes)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        if self.values.ndim != 1:
            raise TypeError("an array of arrays")
        return iter(self.values.tolist())

    def __bool__(self) -> bool:
        return bool(self.values)  # which numpy refuses if there are several


def read_observation(text: str) -> list[Any] | bool:
    """What a program's process wrote: values, with an `Opaque` for every object in them, or
    whether a comparison of objects holds.

    Raises:
        ValueError: if it is neither.
    """
    try:
        kind, found = json.loads(text)
        return bool(found) if kind == "holds" else _items(found)
    except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"no plain data: {error}") from error


def _read(sent: Any) -> Any:
    if not isinstance(sent, list):
        if isinstance(sent, dict):
            raise ValueError("a JSON object")
        return sent  # None, a bool, a number, a text
    kind, content = sent
    return _KINDS[str(kind)](content) if str(kind) in _KINDS else Opaque(content)


def _items(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError("no list of items")
    return [_read(item) for item in content]


def _pairs(content: Any) -> dict[Any, Any]:
    return {_read(key): _read(value) for key, value in content}


def _of_numbers(kind: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda content: kind(*map(int, content))


def _int(digits: Any) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError("a number of so many digits that calculating with it takes long")
    return int(digits, 16)


def _range(bounds: Any) -> range:
    found = range(*map(int, bounds))
    if len(found) > _MOST_ITEMS:
        raise ValueError("a range too long to go through")
    return found


def checked_decimal(found: Decimal) -> Decimal:
    """The number, unless it would be a whole number of any number of digits."""
    if found.is_finite() and abs(found.adjusted()) > _MOST_DIGITS:
        raise ValueError("a decimal number of an exponent beyond all use")
    return found


_MOST_DIGITS, _MOST_ITEMS = 100_000, 1_000_000
_INTEGERS = [f"{sign}{size}" for sign in "iu" for size in (1, 2, 4, 8)]
_ARRAYS = ("b1", *_INTEGERS, "f2", "f4", "f8", "c8", "c16", "U")

_KINDS: dict[str, Callable[[Any], Any]] = {
    "int": _int,
    "list": _items,
    "tuple": lambda content: tuple(_items(content)),
    "set": lambda content: set(_items(content)),
    "frozenset": lambda content: frozenset(_items(content)),
    "dict": _pairs,
    "counter": lambda content: Counter(_pairs(content)),
    "deque": lambda content: deque(_items(content)),
    "range": _range,
    "complex": lambda content: complex(*map(float, content)),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "fraction": lambda content: Fraction(*_items(content)),
    "decimal": lambda content: checked_decimal(Decimal(str(content))),
    "date": _of_numbers(datetime.date),
    "time": _of_numbers(datetime.time),
    "datetime": _of_numbers(datetime.datetime),
    "timedelta": _of_numbers(datetime.timedelta),
    "array": lambda content: Array(*content),
    "iterator": lambda content: Iterated(_items(content)),
    "keys": lambda content: dict.fromkeys(_items(content)).keys(),
    "values": lambda content: dict(enumerate(_items(content))).values(),
    "items": lambda content: _pairs(content).items(),
}
