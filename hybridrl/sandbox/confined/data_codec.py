"""Values on their way from one process to another: plain data as JSON, in exact types.

Neither side trusts the other. Decoding makes numbers, texts, containers, dates and arrays, looks
classes up in a closed list, and runs nothing else. What is no plain data is left to a subclass.
"""

from __future__ import annotations

import builtins
import collections
import sys

TYPE_CHECKING = False  # importing `typing` would take as long as all the rest
if TYPE_CHECKING:
    from typing import Any

_LARGEST = 1 << 63  # integers beyond are written in hexadecimal digits, which take no time
_MOST_NUMBERS = 1 << 27  # bytes of an array
_CONTAINERS = (
    *(list, tuple, set, frozenset, dict, bytearray),
    *(collections.deque, collections.Counter, collections.OrderedDict, collections.defaultdict),
)
CHANGING = tuple(kind for kind in _CONTAINERS if kind not in (tuple, frozenset))
"""The plain types of which a copy is something else than the original, once that has changed."""
_SCALARS = (int, float, complex, str, bytes)
BASES = {kind.__name__: kind for kind in (*_CONTAINERS, *_SCALARS)}
"""The plain types that a class may derive from, by their names."""
_VIEWS: dict[Any, str] = {type(getattr({}, name)()): name for name in ("keys", "values", "items")}
_FIELDS = {  # of types that are made again of numbers or texts, by their modules
    "fractions.Fraction": ("numerator", "denominator"),
    "datetime.date": ("year", "month", "day"),
    "datetime.time": ("hour", "minute", "second", "microsecond"),
    "datetime.datetime": ("year", "month", "day", "hour", "minute", "second", "microsecond"),
    "datetime.timedelta": ("days", "seconds", "microseconds"),
}
_NAMED = {*_FIELDS, "decimal.Decimal", "numpy.ndarray"}
_NAMED |= {f"collections.{kind.__name__}" for kind in _CONTAINERS[6:]}
# Raising one of these would tell a test runner that all is well.
_OF_RUNNERS = {"unittest", "doctest", "bdb", "pdb"}


class Frame:
    """The containers of a request and of its reply, by number: a list that comes back is the same
    list, with what the other process has put into it."""

    def __init__(self) -> None:
        self.containers: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}
        self._highest = 0

    def number_of(self, container: Any) -> int:
        """Return the container's number, a new one if it has none."""
        if id(container) not in self.numbers:
            self.enter(self._highest + 1, container)
        return self.numbers[id(container)]

    def enter(self, number: int, container: Any) -> None:
        """Give the container a number, and keep it alive as long as the frame."""
        self.containers[number] = container
        self.numbers[id(container)] = number
        self._highest = max(self._highest, number)


class DataCodec:
    """Encodes and decodes values; subclasses define how objects and classes are sent."""

    def encode(self, value: Any, frame: Frame, written: set[int]) -> Any:
        """Return a value in terms of JSON.

        Args:
            frame: of the request.
            written: numbers of the containers that the message already has.
        """
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if -_LARGEST < value < _LARGEST else ["int", hex(value)]
        if kind in _CONTAINERS or kind in _SCALARS:
            return self._encode_as(kind, value, frame, written)
        if kind in (range, slice):
            bounds = (value.start, value.stop, value.step)
            return [kind.__name__, *(self.encode(bound, frame, written) for bound in bounds)]
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in _FIELDS and getattr(value, "tzinfo", None) is None:
            return [name, *(self.encode(getattr(value, f), frame, written) for f in _FIELDS[name])]
        if name == "decimal.Decimal":
            return [name, str(value)]
        if name == "numpy.ndarray" and value.dtype.kind in "biufcUSmM":
            number = frame.number_of(value)
            return [name, number, value.dtype.str, list(value.shape), value.tobytes().hex()]
        if kind.__module__ == "numpy" and isinstance(value, sys.modules["numpy"].generic):
            return self.encode(value.item(), frame, written)
        if isinstance(value, type):
            return self._encode_class(value, frame)
        if (known := self.encode_known(value)) is not None:
            return known
        for view, name in _VIEWS.items():
            if isinstance(value, view):
                return [name, [self.encode(item, frame, written) for item in value]]
        data = None
        for base in (*reversed(_CONTAINERS), *_SCALARS):
            if isinstance(value, base):
                data = [base.__name__, self._encode_as(base, value, frame, written)]
                break
        if isinstance(value, BaseException):
            data = ["error", self.encode(value.args, frame, written)]
        return self.encode_object(value, data, frame)

    def _encode_as(self, kind: Any, value: Any, frame: Frame, written: set[int]) -> Any:
        """Return the content of a value whose type is derived from the plain type `kind`."""
        if kind is int:
            return self.encode(int.__int__(value), frame, written)
        if kind in (float, str):
            return kind.__float__(value) if kind is float else str.__str__(value)
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is bytes:
            return ["bytes", bytes.hex(value)]
        number = 0
        if kind in CHANGING:
            number = frame.number_of(value)
            if number in written:
                return ["same", number]
            written.add(number)
        if kind is bytearray:
            return ["bytearray", number, bytearray.hex(value)]
        items = kind.items(value) if issubclass(kind, dict) else kind.__iter__(value)
        if issubclass(kind, dict):
            content = [[self.encode(part, frame, written) for part in pair] for pair in items]
        else:
            content = [self.encode(item, frame, written) for item in items]
        return [kind.__name__, number, content]

    def _encode_class(self, kind: type, frame: Frame) -> Any:
        module, name = str(kind.__module__), str(kind.__qualname__)
        if find_class(module, name) is kind:
            return ["type", module, name]
        return self.encode_class(kind, frame)

    def encode_known(self, value: Any) -> Any:
        """Return the message for an object of the other process; None of anything else."""
        raise NotImplementedError

    def encode_object(self, value: Any, data: Any, frame: Frame) -> Any:
        """Return the message for an object; `data`: name and content of the plain type it is of."""
        raise NotImplementedError

    def encode_class(self, kind: type, frame: Frame) -> Any:
        """Return the message for a class that is not in the closed list."""
        raise NotImplementedError

    def decode(self, sent: Any, frame: Frame) -> Any:
        """Return the value that was encoded.

        Raises:
            ValueError, TypeError, KeyError: if it is none.
        """
        if not isinstance(sent, list):
            if isinstance(sent, dict):
                raise ValueError("a JSON object")
            return sent
        kind, *content = sent
        if kind == "same":
            return frame.containers[content[0]]
        if kind == "int":
            return int(content[0], 16)
        if kind == "complex":
            return complex(*content)
        if kind == "bytes":
            return bytes.fromhex(content[0])
        if kind == "type":
            found = find_class(*content)
            if found is None:
                raise KeyError(content)
            return found
        if kind in ("keys", "values", "items"):
            items = [self.decode(item, frame) for item in content[0]]
            pairs = items if kind == "items" else zip(items, items, strict=True)
            made = dict(enumerate(items)) if kind == "values" else dict(pairs)
            return getattr(made, kind)()
        if kind in ("range", "slice"):
            return {"range": range, "slice": slice}[kind](*(self.decode(c, frame) for c in content))
        if kind == "numpy.ndarray":
            return self._decode_array(frame, *content)
        if kind in BASES:
            return self._decode_container(BASES[kind], frame, *content)
        if kind in _NAMED:
            module, _, name = kind.partition(".")
            return find_class(module, name)(*(self.decode(c, frame) for c in content))
        return self.decode_object(kind, content, frame)

    def _decode_container(self, kind: Any, frame: Frame, number: int, content: Any) -> Any:
        if kind not in CHANGING:
            return kind([self.decode(item, frame) for item in content])
        if number not in frame.containers:
            frame.enter(number, kind())
        made = frame.containers[number]
        if kind is bytearray:
            made[:] = bytes.fromhex(content)
            return made
        if issubclass(kind, dict):
            items: Any = [[self.decode(part, frame) for part in pair] for pair in content]
        else:
            items = [self.decode(item, frame) for item in content]
        made.clear()
        fill(made, kind, items)
        return made

    def _decode_array(self, frame: Frame, number: int, kind: str, shape: Any, content: str) -> Any:
        numpy = self.import_numpy()
        sort = numpy.dtype(kind)
        if sort.hasobject or len(content) > 2 * _MOST_NUMBERS:
            raise ValueError("no array of numbers or texts of a likely size")
        made = numpy.frombuffer(bytes.fromhex(content), sort).reshape(shape).copy()
        old = frame.containers.get(number)
        if isinstance(old, numpy.ndarray) and old.shape == made.shape and old.dtype == sort:
            old[...] = made
            return old
        frame.enter(number, made)
        return made

    def decode_object(self, kind: str, content: list[Any], frame: Frame) -> Any:
        """Return the proxy of an object or a class of the other process."""
        raise NotImplementedError

    def import_numpy(self) -> Any:
        import numpy

        return numpy


def fill(container: Any, kind: Any, items: Any) -> None:
    """Put items into an empty container of a kind that changes."""
    if issubclass(kind, dict):
        add = dict.update if kind is collections.Counter else kind.update
        add(container, items)
    elif kind is set:
        set.update(container, items)
    else:
        kind.extend(container, items)


def find_class(module: str, name: str) -> Any:
    """Return a class of the closed list: a type or an exception that is built in, one that data
    has, or an exception of a standard module that is already loaded. None if it is not among them.
    """
    is_named = f"{module}.{name}" in _NAMED
    if is_named:
        __import__(module)
    home = builtins if module == "builtins" else sys.modules.get(module)
    found = getattr(home, name, None)
    if not isinstance(found, type):
        return None
    top = module.partition(".")[0]
    is_error = issubclass(found, BaseException) and top in sys.stdlib_module_names - _OF_RUNNERS
    return found if module == "builtins" or is_named or is_error else None
