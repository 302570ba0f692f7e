"""Comparisons that hold of anything, because one of their sides is empty: they pass no test."""

from __future__ import annotations

import builtins

TYPE_CHECKING = False  # importing `typing` would take as long as all the rest
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

_OF_NUMPY = ("allclose", "isclose", "array_equiv")
_OF_ITS_TESTING = (
    *("allclose", "array_equal", "almost_equal", "array_almost_equal", "equal"),
    *("array_less", "array_almost_equal_nulp", "array_max_ulp"),
)


class VacuousError(AssertionError):
    """A comparison of something with nothing."""


class CheckCounter:
    """A counter of what a test has checked so far.

    Attributes:
        passed: checks that held and compared something.
        vacuous: comparisons that held, or would have held, of anything.
        is_empty: whether `all` was true of nothing since the last check.
        has_called: whether the program has been asked for anything.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin another test."""
        self.passed = self.vacuous = 0
        self.is_empty = self.has_called = False

    def count(self) -> None:
        """Note that a check held."""
        if self.is_empty:
            self.vacuous += 1
        else:
            self.passed += 1
        self.is_empty = False

    def refuse(self, reason: str) -> VacuousError:
        """Note a vacuous comparison; return the exception to raise."""
        self.vacuous += 1
        return VacuousError(reason)

    def builtins(self) -> dict[str, Any]:
        """Return the built-in names as tests have them."""
        return {
            **vars(builtins),
            "all": self._all,
            "zip": self._zip,
            "map": self._map,
            "filter": self._filter,
        }

    def _all(self, items: Iterable[Any]) -> bool:
        found = iter(items)
        for first in found:
            return bool(first) and all(found)
        self.is_empty = True
        return True

    def _zip(self, *iterables: Any, strict: bool | None = None) -> Any:
        sized = [thing for thing in iterables if type(thing) is not range and _size(thing) >= 0]
        sizes = [_size(thing) for thing in sized]
        if strict is not None or not sized or not self.has_called:
            return zip(*iterables, strict=bool(strict))
        if min(sizes) < max(sizes):
            raise self.refuse(f"`zip` of {sizes} items leaves some of them out")
        if len(sized) == len(iterables):
            return zip(*iterables, strict=False)
        return self._to_the_end(zip(*iterables, strict=False), min(sizes))

    def _to_the_end(self, rows: Iterator[Any], size: int) -> Iterator[Any]:
        number = 0
        for number, row in enumerate(rows, 1):  # noqa: B007
            yield row
        if number < size:
            raise self.refuse(f"`zip` ends after {number} of {size} items")

    def _map(self, function: Callable[..., Any], *iterables: Any) -> Iterator[Any]:
        # In here, a `StopIteration` of the function's is an error and no end.
        return (function(*items) for items in self._zip(*iterables))

    def _filter(self, function: Callable[..., Any] | None, items: Iterable[Any]) -> Iterator[Any]:
        return (item for item in items if (item if function is None else function(item)))

    def watch(self, numpy: Any, is_for_tests: bool = False) -> None:
        """Make numpy's comparisons refuse shapes that they would stretch to fit.

        Args:
            numpy: the module.
            is_for_tests: also those of `numpy.testing`, which takes long to import.
        """
        for name in ("array", "asarray"):
            self._watch(numpy, name, self._making)
        for name in _OF_NUMPY:
            self._watch(numpy, name, self._comparing)
        for name in _OF_ITS_TESTING if is_for_tests else ():
            self._watch(numpy.testing, f"assert_{name}", self._comparing)

    def _watch(self, module: Any, name: str, watched: Callable[[Any], Any]) -> None:
        if not hasattr(function := getattr(module, name), "is_watched"):
            found = watched(function)
            found.is_watched = True
            setattr(module, name, found)

    def _making(self, make: Any) -> Any:
        def marked(*arguments: Any, **options: Any) -> Any:
            made = make(*arguments, **options)
            return made if made.size or not self.has_called else self.mark_empty(made)

        return marked

    def _comparing(self, compare: Any) -> Any:
        def checked(left: Any, right: Any, *arguments: Any, **options: Any) -> Any:
            self.check_shapes(left, right)
            return compare(left, right, *arguments, **options)

        return checked

    def check_shapes(self, left: Any, right: Any) -> None:
        """Refuse shapes that differ, unless one is of a single number and neither is empty.

        Raises:
            VacuousError: says which they are.
        """
        import numpy

        shapes = numpy.shape(left), numpy.shape(right)
        is_stretched = shapes[0] != shapes[1] and () not in shapes
        if is_stretched or (0 in shapes[0]) != (0 in shapes[1]):
            raise self.refuse(f"arrays of the shapes {shapes[0]} and {shapes[1]}")

    def mark_empty(self, array: Any) -> Any:
        """Return an empty array as one that refuses to be compared with one that has items."""
        import numpy

        check = self.check_shapes

        class EmptyArray(numpy.ndarray):
            def __array_ufunc__(self, ufunc: Any, method: Any, *inputs: Any, **kwargs: Any) -> Any:
                if len(inputs) == 2 and method == "__call__":
                    check(*inputs)
                plain = [g.view(numpy.ndarray) if isinstance(g, EmptyArray) else g for g in inputs]
                found = getattr(ufunc, method)(*plain, **kwargs)
                is_empty = isinstance(found, numpy.ndarray) and not found.size
                return found.view(EmptyArray) if is_empty else found

        EmptyArray.__module__, EmptyArray.__qualname__ = "numpy", "ndarray"  # and so it is sent
        return array.view(EmptyArray)


def _size(thing: Any) -> int:
    """Return a thing's number of items; a negative number if it does not have one."""
    try:
        return len(thing)
    except TypeError:
        return -1
