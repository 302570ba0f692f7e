"""Two processes that use each other's objects: questions go one way, answers the other.

Plain data crosses; for everything else crosses a number. While one process waits for an answer, it
answers the other's questions, so that a program can call functions that a test has passed to it.
"""

from __future__ import annotations

import math
import operator
import os
import sys
from _json import encode_basestring_ascii, make_encoder, make_scanner
from _thread import RLock

from . import proxies
from .data_codec import BASES, DataCodec, Frame, fill
from .linux_kernel import read_fully
from .proxies import ObjectHandle, RemoteClass, RemoteData, RemoteError, RemoteObject, handle_of

TYPE_CHECKING = False  # importing `typing` would take as long as all the rest
if TYPE_CHECKING:
    from typing import Any

_MOST_BYTES = 1 << 28  # of a message
_PIECE = 1 << 20
_OF_A_QUESTION = 3  # the containers that every question has
_LENDING = ("getattr", "getitem", "name")  # what is got by these may be changed by who got it
_MOST_LENT, _MOST_ITEMS = 8, 1000


class ProgramFailedError(BaseException):
    """The other process is gone, or did what no test forgives. No `except Exception` catches it."""


class ObjectExchange(DataCodec):
    """One end.

    Args:
        source, sink: descriptors of pipes from and to the other process.

    Attributes:
        failure: why nothing that the other process says counts any more; None while it does.
        is_over: whether it will say nothing more.
    """

    def __init__(self, source: int, sink: int) -> None:
        self.failure: str | None = None
        self.is_over = False
        self._source, self._sink = source, sink
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._proxies: dict[int, Any] = {}
        self._classes: dict[int, type] = {}
        self._asked = 0
        self._lent: list[list[Any]] = []  # question, what came, its frame, and what that was
        self._lending: dict[int, Frame] = {}  # the frames of the other's last such questions
        self._lock = RLock()  # other threads of a program may ask, too

    def ask(self, operation: str, arguments: list[Any], options: dict[str, Any]) -> Any:
        """Return what the operation gives in the other process, or raise what it raises there.
        Lists and their like that it has changed there are changed here, and the other way round for
        what an attribute was."""
        with self._lock:
            frame, number = Frame(), self._asked
            self._asked += 1
            given = self.encode([arguments, options], frame, set())
            self._send_text(encode_message(["ask", self._changed(), number, operation, given]))
            while True:
                kind, *content = self.receive()
                if kind != "ask":
                    break
                self._answer(*content)
            found = self._take(frame, kind, *content)
            containers = frame.containers.values()
            is_lent = operation in _LENDING and len(containers) > _OF_A_QUESTION
            if is_lent and sum(map(len, containers)) < _MOST_ITEMS:
                before = self.encode(found, frame, set())
                self._lent = [*self._lent[1 - _MOST_LENT :], [number, found, frame, before]]
            return found

    def _changed(self) -> list[Any]:
        """Return what has been changed here of values of the other process, by question."""
        changed = []
        for lent in self._lent:
            number, value, frame, before = lent
            lent[3] = self.encode(value, frame, set())
            if lent[3] != before:
                changed.append([number, lent[3]])
        return changed

    def _take_changed(self, changed: list[Any]) -> None:
        for number, content in changed:
            if number in self._lending:
                self.decode(content, self._lending[number])

    def serve(self) -> None:
        """Answer questions until the other process is gone."""
        while not self.is_over:
            try:
                _, *content = self.receive()
                self._answer(*content)
            except ProgramFailedError:
                pass

    def perform(self, operation: str, arguments: list[Any], options: dict[str, Any]) -> Any:
        """Return the answer to a question of the other process."""
        return OPERATIONS[operation](*arguments, **options)

    def printed(self) -> str:
        """Return the text printed since the last answer."""
        return ""

    def _answer(self, lent: list[Any], number: int, operation: str, sent: Any) -> None:
        frame, kind, given = Frame(), "reply", None
        try:
            self._take_changed(lent)
            given = self.decode(sent, frame)
            result = self.perform(operation, *given)
        except BaseException as error:
            kind, result = "raise", error
        try:
            text = self._write_answer(kind, sent, given, result, frame)
        except BaseException:  # of data without an end, or without memory for it
            text = self._write_answer("raise", sent, None, RuntimeError("no data"), Frame())
        if operation in _LENDING:
            self._lending[number] = frame
            if len(self._lending) > 100 * _MOST_LENT:
                del self._lending[min(self._lending)]
        self._send_text(text)

    def _write_answer(self, kind: str, sent: Any, given: Any, result: Any, frame: Frame) -> bytes:
        written, changed = set[int](), None
        if len(frame.containers) > _OF_A_QUESTION:  # something may be changed
            changed = self.encode(given, frame, written)
        if changed is None or changed == sent:
            changed, written = None, set(frame.containers)
        found = self.encode(result, frame, written)
        return encode_message([kind, self._changed(), changed, found, self.printed()])

    def _take(
        self, frame: Frame, kind: str, lent: list[Any], changed: Any, result: Any, printed: str
    ) -> Any:
        self._take_changed(lent)
        if printed:
            sys.stdout.write(str(printed))
        if changed is not None:
            self.decode(changed, frame)
        found = self.decode(result, frame)
        if kind == "raise":
            raise self.error_to_raise(found)
        return found

    def error_to_raise(self, found: Any) -> BaseException:
        """Return the exception to raise here for one that was raised there."""
        return found if isinstance(found, BaseException) else RuntimeError()

    def send(self, message: Any) -> None:
        self._send_text(encode_message(message))

    def _send_text(self, text: bytes) -> None:
        view = memoryview(len(text).to_bytes(8, "little") + text)
        try:
            while view:
                view = view[os.write(self._sink, view[:_PIECE]) :]
        except OSError:
            raise self._end("the program has ended") from None

    def receive(self) -> Any:
        size = int.from_bytes(self._read(8), "little")
        if size > _MOST_BYTES:
            raise self._end("the program sent too much")
        try:
            return _scan(self._read(size).decode(), 0)[0]
        except (ValueError, StopIteration, RecursionError):
            raise self._end("the program sent what is no message") from None

    def _read(self, size: int) -> bytes:
        content = read_fully(self._source, size)
        if len(content) < size:
            raise self._end("the program has ended")
        return content

    def fail(self, reason: str) -> ProgramFailedError:
        """Note that the other process counts no more; return the exception to raise."""
        self.failure = reason
        return ProgramFailedError(reason)

    def _end(self, reason: str) -> ProgramFailedError:
        self.is_over = True
        return self.fail(reason)

    def encode_known(self, value: Any) -> Any:
        handle = handle_of(value)
        if handle is None or handle.exchange is not self:
            return None
        return ["yours", handle.number]

    def encode_object(self, value: Any, data: Any, frame: Frame) -> Any:
        return ["object", self._number_of(value), self.encode(type(value), frame, set()), data]

    def encode_class(self, kind: type, frame: Frame) -> Any:
        if (known := self.encode_known(kind)) is not None:
            return known
        bases = [self.encode(base, frame, set()) for base in kind.__bases__ if base is not object]
        return ["class", self._number_of(kind), kind.__name__, bases]

    def _number_of(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return number

    def decode_object(self, kind: str, content: list[Any], frame: Frame) -> Any:
        if kind == "yours":
            return self._objects[content[0]]
        if kind == "class":
            return self._class_for(frame, *content)
        number, of_class, data = content
        if number in self._proxies:
            return self._proxies[number]
        remote = self.decode(of_class, frame)
        if not isinstance(remote, type):
            raise TypeError("an object of no class")
        if data is None:
            kind_of: Any = remote if isinstance(remote, RemoteClass) else RemoteObject
            made = object.__new__(kind_of)
            self._proxies[number] = made
        else:
            made = self._data_for(frame, remote, *data)
            if type(made) is remote and not isinstance(remote, RemoteClass):
                return made
        proxies.attach(made, ObjectHandle(self, number))
        return _wait_for(made) if remote.__name__ == "coroutine" else made

    def _data_for(self, frame: Frame, remote: Any, base: str, sent: Any) -> Any:
        content = self.decode(sent, frame)
        plain: Any = BaseException if base == "error" else BASES[base]
        if not issubclass(remote, plain):
            raise TypeError("an object of another class than its own")
        if base == "error":
            try:
                return type.__call__(remote, *content)
            except TypeError:
                return remote.__new__(remote, *content)
        if plain in (int, float, complex, str, bytes, tuple, frozenset):
            return plain.__new__(remote, content)
        made = plain.__new__(remote)
        fill(made, plain, content)
        return made

    def _class_for(self, frame: Frame, number: int, name: str, sent: list[Any]) -> type:
        if number not in self._classes:
            bases = [self.decode(base, frame) for base in sent]
            self._classes[number] = self._make_class(number, str(name), bases)
        return self._classes[number]

    def _make_class(self, number: int, name: str, bases: list[type]) -> type:
        ancestors = {number}.union(*(vars(base).get("_ancestors", ()) for base in bases))
        handle = ObjectHandle(self, number)
        names = {"_remote": handle, "_ancestors": ancestors, "__module__": "__main__"}
        errors = tuple(base for base in bases if issubclass(base, BaseException))
        plain = next((p for b in bases for p in reversed(BASES.values()) if issubclass(b, p)), None)
        others = tuple(base for base in bases if issubclass(base, RemoteObject))
        if errors:
            kinds: tuple[type, ...] = errors
            if not issubclass(errors[0], RemoteError):
                kinds = (RemoteError, *errors)
        else:
            kinds = (RemoteData, plain) if plain else others or (RemoteObject,)
        try:
            made: type = type.__call__(RemoteClass, name, kinds, names)
        except TypeError:  # of several bases of different kinds
            made = type.__call__(RemoteClass, name, (kinds[0],), names)
        return made


class _JsonContext:
    """The settings of `json.JSONDecoder`: importing `json` would take half as long as a small
    program's verdict."""

    strict, memo = True, None
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int
    parse_constant = staticmethod(float)  # of `NaN`, `Infinity` and `-Infinity`


_context: Any = _JsonContext
_no_default: Any = None
_scan = make_scanner(_context)
_write = make_encoder(
    None, _no_default, encode_basestring_ascii, None, ":", ",", False, False, True
)


def encode_message(message: Any) -> bytes:
    """Return a message as JSON.

    Raises:
        TypeError, RecursionError: if it is none.
    """
    return "".join(_write(message, 0)).encode()


async def _wait_for(coroutine: Any) -> Any:
    return await coroutine


def _exit(thing: Any, error: Any) -> Any:
    kind = None if error is None else type(error)
    return type(thing).__exit__(thing, kind, error, None)


def _await(thing: Any) -> Any:
    import asyncio

    return asyncio.run(_wait_for(thing))


OPERATIONS: dict[str, Any] = {
    **{name: getattr(operator, f"__{name}__") for name in proxies.ARITHMETIC if name != "divmod"},
    **{name: getattr(operator, name) for name in proxies.COMPARISONS},
    **{name: getattr(operator, name) for name in ("neg", "pos", "invert", "index", "contains")},
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem")},
    **{kind.__name__: kind for kind in (bool, str, int, float, complex, reversed)},
    **{do.__name__: do for do in (len, iter, next, repr, hash, abs, round, format, divmod)},
    **{do.__name__: do for do in (getattr, setattr, delattr, math.trunc, math.floor, math.ceil)},
    "call": lambda thing, *arguments, **options: thing(*arguments, **options),
    "itself": lambda thing: thing,
    "enter": lambda thing: type(thing).__enter__(thing),
    "exit": _exit,
    "await": _await,
}
